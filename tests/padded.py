"""Padded batches, and a plain and an optimized model side by side that must agree on them."""

import time

import torch
import transformers as hf
from cases import GRADIENT, close, gradient_error
from families import FAMILIES, VOCABULARY
from torch import nn

import autofuse

LENGTHS, WIDTH = (30, 7, 12, 5, 9, 4), 62
MODERNBERT = {
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
}


def padded(kind, side="right", lengths=LENGTHS, width=WIDTH, seed=3):
    """A batch with rows of these lengths. Causal labels are all tokens; "prompt": but each row's first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, n in zip(ids, lengths, strict=True):
        row[slice(0, n) if side == "right" else slice(width - n, width)] = torch.randint(
            3, VOCABULARY, (n,), generator=generator
        )
    mask = (ids > 0).long()
    batch = {"input_ids": ids, "attention_mask": mask}
    labels = ids.masked_fill(mask == 0, -100)
    if kind == "prompt":
        labels.scatter_(1, mask.argmax(1, keepdim=True), -100)
    if kind == "masked":
        labels = labels.masked_fill(torch.rand(ids.shape, generator=generator) > 0.4, -100)
    if kind == "classes":
        labels = torch.randint(0, 3, (len(lengths),), generator=generator)
    if kind == "seq2seq":
        labels = torch.randint(3, VOCABULARY, (len(lengths), 40), generator=generator)
        labels = labels.masked_fill(torch.arange(40) > torch.tensor(lengths)[:, None] % 13, -100)
    return {**batch, "labels": labels}


class Watched:
    """A plain model and the same one in an optimized step, which notes the batches it is called with."""

    def __init__(self, model, *, timed=False, **options):
        self.plain, self.fast, self.seen = model(), model(), []
        options = {"precision": "fp32", "compile": False, "only": ["padding"], "measure": False, **options}
        self.step = autofuse.optimize(self.fast, None, **options)
        self.step._patches.get("padding").timed = timed  # as it is where the tuner is at work
        self.fast.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs):
        if torch.is_grad_enabled():
            self.seen.append(kwargs)

    def __call__(self, batch):
        """One step of both, which must agree; returns (plain outputs, outputs)."""
        self.plain.zero_grad(), self.fast.zero_grad()
        expected = self.plain(**batch)
        expected.loss.backward()
        loss, outputs = self.step(batch, return_outputs=True)
        assert close(loss.item(), expected.loss.item())
        assert gradient_error(self.plain, self.fast) <= GRADIENT
        assert type(outputs) is type(expected) and close(outputs.loss.item(), expected.loss.item())
        return expected, outputs

    def calls(self, batch):
        """How often the model is called in a step: once, if there is nothing left to prove."""
        before = len(self.seen)
        self(batch)
        return len(self.seen) - before

    @property
    def shape(self):
        """The shape of the last batch that the model got."""
        return tuple(self.seen[-1]["input_ids"].shape)

    def sites(self):
        return {site.path: site.accepted for site in self.step.report["padding"].sites}

    def reason(self, name):
        return next(s.reason for s in self.step.report["padding"].sites if s.path == name)


def of(name, **config):
    return lambda: FAMILIES[name].model(**config)


def modernbert(cls="ModernBertForMaskedLM"):
    torch.manual_seed(0)
    config = hf.ModernBertConfig(
        vocab_size=VOCABULARY, num_hidden_layers=4, num_attention_heads=4, num_labels=3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, **MODERNBERT,
    )  # fmt: skip
    return getattr(hf, cls)(config).train()


class MeanOfAll(nn.Module):
    """Pools over padding too, and goes by the length: whatever is trimmed shows."""

    def __init__(self, threshold):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.threshold = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 1), threshold

    def forward(self, input_ids, attention_mask, labels):
        x = self.embedding(input_ids)
        if input_ids.shape[1] <= self.threshold:
            pooled = x.mean(1)
        else:
            mask = attention_mask[..., None].float()
            pooled = (x * mask).sum(1) / mask.sum(1)
        logits = self.head(pooled)
        loss = (logits.squeeze(1) - labels).square().mean()
        return hf.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)


class ZeroGate(nn.Module):
    """What is wrong with trimming hides behind a gate that starts at zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.gate = MeanOfAll(0), nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, input_ids, attention_mask, labels):
        outputs = self.inner(input_ids, attention_mask, labels)
        leak = self.inner.embedding(input_ids).mean()
        outputs.loss = outputs.loss + self.gate * leak
        return outputs


class Block(nn.Module):
    """Attention of one head, and a nap where rows are packed."""

    def __init__(self, width, nap):
        super().__init__()
        self.mix, self.out, self.nap = nn.Linear(width, 3 * width), nn.Linear(width, width), nap

    def forward(self, x, attention_mask):
        time.sleep(self.nap if x.shape[0] < len(LENGTHS) else 0.0)
        q, k, v = self.mix(x)[:, None].chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attention_mask)[:, 0])


class Tower(nn.Module):
    def __init__(self, width=8, nap=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, nap) for _ in range(2))

    def forward(self, x, attention_mask=None):
        for block in self.blocks:
            x = block(x, attention_mask)
        return x


class Pooled(nn.Module):
    """One label for each row, of what one or two towers' calls make of its tokens."""

    def __init__(self, pool, nap=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.tower, self.head = nn.Embedding(VOCABULARY, 8), Tower(nap=nap), nn.Linear(8, 3)
        self.pool = pool

    def forward(self, input_ids, attention_mask, labels, other_ids=None, other_mask=None):
        pooled = self.encode(input_ids, attention_mask)
        if other_ids is not None:
            pooled = pooled - self.encode(other_ids, other_mask)
        logits = self.head(pooled)
        loss = nn.functional.cross_entropy(logits, labels)
        return hf.modeling_outputs.SequenceClassifierOutput(loss=loss, logits=logits)

    def encode(self, ids, mask):
        pairs = None if self.pool == "no mask" else mask.bool()[:, None, None, :]
        x = self.tower(self.embedding(ids), attention_mask=pairs)
        return x[:, 0] if self.pool == "first" else x.mean(1)

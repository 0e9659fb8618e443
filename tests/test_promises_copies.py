"""Copies: pickles that load where autofuse is not installed, deepcopy, EMA, tied weights."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import CASES, adamw, arguments, close, fast_loop, loss_of, optimize, outputs, plain_loop
from torch import nn
from torch.optim.swa_utils import AveragedModel

every_case = pytest.mark.parametrize("name", CASES)
HERE = Path(__file__).parent

# Loads every file and says, per case, whether the model is the plain one.
LOADER = """
import pickle, sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("autofuse", "patchers"):
            raise ModuleNotFoundError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
sys.path[:0] = [sys.argv[2]]
import torch
torch.set_num_threads(1)
from families import FAMILIES
from legacy import LEGACY

for name, case in {**FAMILIES, **LEGACY}.items():
    folder = Path(sys.argv[1], name)
    try:
        expected = torch.load(folder / "expected.pt", weights_only=False)
        kinds = [(n, type(m)) for n, m in case.model().named_modules()]
        for file in ("saved.pt", "pickled.pkl"):
            with (folder / file).open("rb") as stream:
                load = pickle.load if file.endswith("pkl") else torch.load
                model = load(stream, **({} if load is pickle.load else {"weights_only": False}))
            assert [(n, type(m)) for n, m in model.named_modules()] == kinds, "its classes differ"
            batch = case.batch()
            inputs = batch if isinstance(batch, dict) else None
            with torch.no_grad():
                if inputs is not None:
                    out = model(**inputs).logits
                else:
                    out = model(batch[0][0] if case.forward is not None else batch[0])
                    out = out[0] if isinstance(out, tuple) else out
            assert torch.equal(out, expected), "its outputs differ"
            model.train()(**batch).loss.backward() if inputs is not None else out.sum()
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        optimizer = torch.load(folder / "whole_optimizer.pt", weights_only=False)
        assert type(optimizer) is torch.optim.AdamW, type(optimizer)
        optimizer.step()
        other = torch.optim.AdamW(case.model().parameters())
        other.load_state_dict(state)
        print("loaded", name)
    except Exception as error:
        print("failed", name, type(error).__name__, error)
"""


def test_pickles_load_in_a_process_without_autofuse(tmp_path):
    for name, case in CASES.items():
        model, folder = case.model(), tmp_path / name
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        fast_loop(case, optimize(case, model, optimizer, measure=False), 1)
        folder.mkdir()
        with torch.no_grad():
            found = outputs(case, model.eval())
        torch.save(found.get(".logits", next(iter(found.values()))), folder / "expected.pt")
        torch.save(model, folder / "saved.pt")
        (folder / "pickled.pkl").write_bytes(pickle.dumps(model))
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(optimizer, folder / "whole_optimizer.pt")
    command = [sys.executable, "-c", LOADER, str(tmp_path), str(HERE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("loaded", "failed"))]
    assert lines == [f"loaded {name}" for name in CASES], "\n".join(lines) + result.stderr[-2000:]


@every_case
def test_a_pickle_taken_here_trains_on_and_can_be_optimized_again(name):
    case = CASES[name]
    model = case.model()
    fast_loop(case, optimize(case, model, adamw(model), measure=False), 1)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    plain = case.model()
    plain.load_state_dict(model.state_dict())
    kinds = {n: type(m) for n, m in case.model().named_modules()}
    assert {n: type(m) for n, m in loaded.named_modules()} == kinds
    step = optimize(case, loaded, adamw(loaded), measure=False)
    assert close(fast_loop(case, step, 2), plain_loop(case, plain, adamw(plain), 2))
    assert step.report["norms"].status == "kept"


# --- deepcopy and EMA -----------------------------------------------------------------------------


@every_case
def test_a_deepcopy_follows_its_own_weights(name):
    case = CASES[name]
    model, plain = case.model(), case.model()
    step = optimize(case, model, adamw(model), measure=False)
    fast_loop(case, step, 1)
    twin = copy.deepcopy(model)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in twin.parameters()}
    assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    plain.load_state_dict(model.state_dict())
    frozen = {key: value.clone() for key, value in twin.state_dict().items()}
    fast_loop(case, step, 2)  # the original moves on; its copy stays
    assert all(torch.equal(value, frozen[key]) for key, value in twin.state_dict().items())
    assert close(plain_loop(case, twin, adamw(twin), 3), plain_loop(case, plain, adamw(plain), 3))


@every_case
def test_a_deepcopy_outlives_undo_of_the_original(name):
    case = CASES[name]
    model, plain = case.model(), case.model()
    step = optimize(case, model, measure=False)
    twin = copy.deepcopy(model)
    step.undo()
    assert close(plain_loop(case, twin, adamw(twin), 2), plain_loop(case, plain, adamw(plain), 2))


@every_case
@pytest.mark.parametrize("made", ["before", "after"])
def test_an_ema_copy_is_the_average_of_the_weights(name, made):
    case = CASES[name]
    fast, plain = case.model(), case.model()
    averages = [AveragedModel(plain, use_buffers=True)]
    if made == "before":
        averages.append(AveragedModel(fast, use_buffers=True))
    plain_optimizer, optimizer = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, fast))
    step = optimize(case, fast, optimizer, measure=False)
    if made == "after":
        averages.append(AveragedModel(fast, use_buffers=True))
    for number in range(3):
        plain_loop(case, plain, plain_optimizer, 1)
        step(*arguments(case, 0))
        averages[0].update_parameters(plain)
        averages[1].update_parameters(fast)
        assert number or list(averages[0].state_dict()) == list(averages[1].state_dict())
    with torch.no_grad():
        expected, found = (outputs(case, average.module.eval()) for average in averages)
    for path, tensor in expected.items():
        torch.testing.assert_close(found[path], tensor, rtol=1e-4, atol=1e-4)


@every_case
def test_weights_loaded_after_optimize_are_used(name):
    case = CASES[name]
    model, other = case.model(), case.model(seed=9)
    step = optimize(case, model, measure=False)
    step(*arguments(case))
    model.load_state_dict(other.state_dict())
    other.zero_grad()
    model.zero_grad()
    expected = loss_of(case, other)
    assert close(step(*arguments(case)).item(), expected.item())
    model.load_state_dict({k: v.clone() for k, v in case.model(seed=4).state_dict().items()}, assign=True)
    assert close(step(*arguments(case)).item(), loss_of(case, case.model(seed=4)).item())


# --- tied weights --------------------------------------------------------------------------------


def tied(model):
    """The groups of names under which one parameter is found."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


TIED = ["gpt2", "bert-mlm", "t5", "bart", "gemma2", "cohere", "whisper", "nanogpt"]


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_stay_tied(name):
    case = CASES[name]
    fast, plain = case.model(), case.model()
    before = tied(fast)
    assert before
    step = optimize(case, fast, adamw(fast), measure=False)
    losses = fast_loop(case, step, 3)
    assert close(losses, plain_loop(case, plain, adamw(plain), 3))
    assert tied(fast) == before and tied(copy.deepcopy(fast)) == before
    step.undo()
    assert tied(fast) == before


class SharedNorm(nn.Module):
    """One norm under two names, and one weight under two norms."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.LayerNorm(8)
        self.third = nn.LayerNorm(8)
        self.third.weight = self.first.weight
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.third(self.second(torch.sin(self.first(x)))))


def test_a_norm_that_is_shared_and_a_weight_that_is_shared():
    plain = SharedNorm()
    fast = copy.deepcopy(plain)
    inputs, targets = torch.randn(4, 8), torch.randn(4, 1)
    step = optimize(CASES["rms"], fast, adamw(fast), loss_fn=nn.functional.mse_loss, measure=False)
    optimizer = adamw(plain)
    for _ in range(3):
        loss = nn.functional.mse_loss(plain(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert close(step(inputs, targets).item(), loss.item())
    assert fast.first is fast.second and fast.first.weight is fast.third.weight
    assert len(step.report["norms"].accepted) == 2


def test_a_parametrization_on_a_swapped_norm_touches_no_shared_class():
    """It makes a subclass on top of the module's class, and puts a property there."""
    from torch.nn.utils import parametrize

    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    models = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    import autofuse

    step = autofuse.optimize(models[1], loss_fn=nn.functional.mse_loss, precision="fp32", measure=False)
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    step(x, y)
    assert "Fused" in type(models[1][0]).__name__
    for model in models:
        parametrize.register_parametrization(model[0], "weight", Twice())
    assert "weight" not in vars(nn.LayerNorm)
    assert close(step(x, y).item(), nn.functional.mse_loss(models[0](x), y).item())
    parametrize.remove_parametrizations(models[1][0], "weight")
    assert type(models[1][0]) is nn.LayerNorm

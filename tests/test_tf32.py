"""The `tf32` patch: where it applies, through both interfaces, restored exactly (the flags exist on CPU)."""

import pytest
import torch
from torch import nn

from autofuse.hardware import Hardware
from autofuse.patch import Context, Patch, Rejected
from patchers import tf32

READERS = {
    "matmul": lambda: torch.backends.cuda.matmul.fp32_precision,
    "conv": lambda: torch.backends.cudnn.conv.fp32_precision,
    "rnn": lambda: torch.backends.cudnn.rnn.fp32_precision,
    "cudnn": lambda: torch.backends.cudnn.fp32_precision,
    "generic": lambda: torch.backends.fp32_precision,
    "mkldnn": lambda: torch.backends.mkldnn.matmul.fp32_precision,
    "old matmul": lambda: torch.backends.cuda.matmul.allow_tf32,
    "old cudnn": lambda: torch.backends.cudnn.allow_tf32,
    "old precision": torch.get_float32_matmul_precision,
}


def read():
    """Every flag that can be read, "raises" for those that cannot."""
    values = {}
    for name, reader in READERS.items():
        try:
            values[name] = reader()
        except RuntimeError:
            values[name] = "raises"
    return values


def reset():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.fixture(autouse=True)
def clean():
    reset()
    before = read()
    yield
    reset()
    assert read() == before


def find(hardware="A100", precision="auto"):
    return tf32.find(Context(nn.Linear(2, 2), (), Hardware.named(hardware), precision=precision))


def set_(path, flag, value):
    setattr(tf32._resolve(path), flag, value)


STATES = {
    "default": lambda: None,
    "old, off": lambda: set_("torch.backends.cuda.matmul", "allow_tf32", False),
    "old, both off": lambda: (
        set_("torch.backends.cuda.matmul", "allow_tf32", False),
        set_("torch.backends.cudnn", "allow_tf32", False),
    ),
    "old, cudnn alone off": lambda: (
        torch.set_float32_matmul_precision("medium"),
        set_("torch.backends.cudnn", "allow_tf32", False),
    ),
    "new, matmul off": lambda: set_("torch.backends.cuda.matmul", "fp32_precision", "ieee"),
    "new, conv off": lambda: set_("torch.backends.cudnn.conv", "fp32_precision", "ieee"),
    "new, everything off": lambda: set_("torch.backends", "fp32_precision", "ieee"),
    "mixed: matmul": lambda: (
        torch.set_float32_matmul_precision("high"),
        set_("torch.backends.cuda.matmul", "fp32_precision", "ieee"),
    ),
    "mixed: conv": lambda: (
        set_("torch.backends.cudnn", "allow_tf32", False),
        set_("torch.backends.cudnn.conv", "fp32_precision", "ieee"),
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_applied_and_restored_exactly(state):
    STATES[state]()
    before = read()
    patch = find()
    assert read() == before, "looking changes nothing"
    assert isinstance(patch, Patch) and not patch.exact
    patch.apply()
    during = read()
    assert {during[name] for name in ("matmul", "conv", "rnn")} == {"tf32"}
    assert "already enabled" in find().reason
    patch.undo()
    assert read() == before


def test_readers_of_the_old_interface_go_on_working():
    patch = find()
    patch.apply()
    during = read()
    patch.undo()
    assert "raises" not in during.values(), "Dynamo and Inductor read both interfaces"
    assert during["old matmul"] is True and during["mkldnn"] == "none", "and CPU products are left alone"


def test_a_flag_that_inherits_goes_on_inheriting():
    torch.backends.fp32_precision = "ieee"
    patch = find()
    patch.apply()
    patch.undo()
    torch.backends.fp32_precision = "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_the_sites():
    (site,) = find().sites
    assert (site.path, site.cls) == ("torch.backends.cuda.matmul", "float32 matmul")
    assert (site.operation, site.provider) == ("tf32", "torch")
    torch.backends.cudnn.allow_tf32 = False
    assert [site.path for site in find().sites] == ["torch.backends.cuda.matmul", "torch.backends.cudnn"]


def test_only_accepted_sites_are_changed():
    torch.backends.cudnn.allow_tf32 = False
    patch = find()
    patch.reject("not wanted", ["torch.backends.cuda.matmul"])
    patch.apply()
    assert torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    patch.undo()
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("how", ["old", "precision", "new", "generic"])
def test_already_enabled(how):
    if how == "old":
        torch.backends.cuda.matmul.allow_tf32 = True
    elif how == "precision":
        torch.set_float32_matmul_precision("medium")
    else:
        set_("torch.backends" + (".cuda.matmul" if how == "new" else ""), "fp32_precision", "tf32")
    found = find()
    assert isinstance(found, Rejected) and found.reason.startswith("already enabled: ")


@pytest.mark.parametrize("precision", ["auto", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("name", "applies"),
    [("P100", 0), ("V100", 0), ("T4", 0), ("A100", 1), ("L4", 1), ("H100", 1), ("B200", 1), ("cpu", 0)],
)  # fmt: skip
def test_where_it_applies(name, applies, precision):
    found = find(name, precision)
    assert isinstance(found, Patch if applies else Rejected)
    if not applies:
        assert "TF32" in found.reason and Hardware.named(name).name in found.reason


def test_fp32_means_fp32():
    assert 'precision="fp32"' in find(precision="fp32").reason


class OldMatmul:
    """A switch of a PyTorch that has the old interface alone."""

    def __init__(self):
        self.allow_tf32 = False


class NewMatmul:
    """A switch of a PyTorch that has the new interface alone."""

    def __init__(self):
        self.fp32_precision = "none"


@pytest.mark.parametrize("kind", [OldMatmul, NewMatmul])
def test_a_pytorch_with_one_interface(kind, monkeypatch):
    fake = kind()
    before = dict(vars(fake))
    monkeypatch.setattr(torch.backends.cuda, "matmul", fake)
    patch = find()
    patch.apply()
    assert vars(fake) == ({"allow_tf32": True} if kind is OldMatmul else {"fp32_precision": "tf32"})
    patch.undo()
    assert vars(fake) == before

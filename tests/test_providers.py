"""The providers, with fake packages of every sort of brokenness on the path."""

import shutil
import sys

import pytest

from autofuse import providers
from autofuse.providers import PROVIDERS, Availability, forget

ROOTS = {row.import_path.partition(".")[0] for row in PROVIDERS.values()} - {"torch"}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Builds fake packages: ``site({"apex/__init__.py": "source"})``, and forgets them afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget_modules():
        ours = (*ROOTS, "amp_C", "fused_layer_norm_cuda", "flash_attn_2_cuda")
        for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
            del sys.modules[name]
        forget()

    def build(files):
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        forget_modules()

    build({})
    yield build
    forget_modules()


APEX = {"apex/__init__.py": "", "apex/normalization/__init__.py": "", "apex/optimizers/__init__.py": ""}
EXTENSIONS = {"amp_C.py": "", "fused_layer_norm_cuda.py": ""}
AMP = {"apex/amp/__init__.py": ""}


def absent(monkeypatch, *names):
    """Not installed, whatever this machine has."""
    real = providers._installed
    monkeypatch.setattr(providers, "_installed", lambda name: name not in names and real(name))


@pytest.mark.parametrize("name", [name for name in PROVIDERS if name != "inductor"])
def test_absent(name, site, monkeypatch):
    absent(monkeypatch, *ROOTS)
    assert PROVIDERS[name].check().startswith("not installed; ")
    assert PROVIDERS[name].reason("cuda").startswith("not installed; ")


def test_apex_that_works(site):
    site(APEX | EXTENSIONS | AMP)
    assert PROVIDERS["apex"].check() is None and PROVIDERS["apex"].note() is None
    assert Availability("cuda", (8, 0))["apex"] is None
    assert Availability("cpu")["apex"] == "runs on cuda only, and this is cpu"


def test_apex_without_cuda_extensions(site):
    site(APEX | AMP)
    assert "built without CUDA extensions (amp_C, fused_layer_norm_cuda missing)" in PROVIDERS["apex"].check()
    site({"amp_C.py": ""})
    assert "(fused_layer_norm_cuda missing)" in PROVIDERS["apex"].check()


@pytest.mark.parametrize(
    "other",
    [
        {"apex/__init__.py": "import pyramid_that_is_not_there"},
        {"apex/__init__.py": "", "apex/lib/__init__.py": ""},
        {"apex.py": "raise SystemExit(3)"},
        {"apex/data.txt": "a folder, not a package"},
    ],
)
def test_another_package_named_apex(other, site):
    site(other | EXTENSIONS)
    assert "a different package of that name" in PROVIDERS["apex"].check()
    assert "apex" not in sys.modules, "it was examined without being imported"


def test_apex_whose_amp_is_removed(site):
    site(APEX | EXTENSIONS)
    assert PROVIDERS["apex"].check() is None
    assert "apex.amp has been removed" in PROVIDERS["apex"].note()


@pytest.mark.parametrize(
    "source",
    [
        "raise ImportError('undefined symbol: _ZN3c10')",
        "raise SystemExit(1)",
        "1/0",
        "def broken(:",
        "import gone",
    ],
)
def test_a_package_that_breaks_on_import_is_a_reason(source, site, capfd):
    noise = "print('noise')\nimport warnings; warnings.warn('noise')\n"
    site(APEX | EXTENSIONS | {"apex/normalization/__init__.py": noise + source})
    reason = PROVIDERS["apex"].check()
    assert "importing apex.normalization fails with" in reason and "\n" not in reason
    assert "noise" not in "".join(capfd.readouterr())


def test_flash_attn(site):
    site({"flash_attn/__init__.py": ""})
    assert "flash_attn_2_cuda missing" in PROVIDERS["flash-attn"].check()
    site({"flash_attn_2_cuda.py": ""})
    assert PROVIDERS["flash-attn"].check() is None
    assert "needs compute capability 8.0 or higher, and this device has 7.5" in PROVIDERS[
        "flash-attn"
    ].reason("cuda", (7, 5))


def test_liger_needs_triton(site, monkeypatch):
    site({"liger_kernel/__init__.py": "", "liger_kernel/ops/__init__.py": "", "triton/__init__.py": "1/0"})
    assert "needs triton, which is installed, but importing triton fails" in PROVIDERS["liger"].check("cuda")
    site({"triton/__init__.py": ""})
    assert PROVIDERS["liger"].check("cuda") is None and PROVIDERS["inductor"].check("cuda") is None


def test_xformers(site):
    site({"xformers/__init__.py": "", "xformers/ops/__init__.py": ""})
    assert PROVIDERS["xformers"].check() is None


def test_nothing_is_imported_for_a_device_that_it_does_not_run_on(site):
    site({"xformers/__init__.py": "1/0", "liger_kernel/__init__.py": "1/0"})
    reasons = dict(Availability("cpu"))
    assert "this is cpu" in reasons["xformers"] and "this is cpu" in reasons["liger"]


def test_each_question_is_answered_once(site):
    site({"xformers/__init__.py": "", "xformers/ops/__init__.py": "1/0"})
    assert (first := PROVIDERS["xformers"].check()) and "ZeroDivisionError" in first
    (repaired := {"xformers/ops/__init__.py": ""}) and site({})
    assert PROVIDERS["xformers"].check() == first
    site(repaired)
    assert PROVIDERS["xformers"].check() is None


def test_a_module_without_a_spec_does_not_raise(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", type(sys)("apex"))
    sys.modules["apex"].__spec__ = None
    assert "a different package" in PROVIDERS["apex"].check()


def test_inductor_needs_the_compiler_that_it_will_call(site, monkeypatch, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tools))
    forget()
    assert "the C++ compiler g++ is not on PATH; install one" in PROVIDERS["inductor"].check("cpu")
    shutil.copy(sys.executable, tools / "clang++")
    forget()
    assert "set CXX=clang++" in PROVIDERS["inductor"].check("cpu")
    monkeypatch.setenv("CXX", "clang++")
    forget()
    assert PROVIDERS["inductor"].check("cpu") is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    forget()
    assert "that $CXX names, 'no-such-compiler'" in PROVIDERS["inductor"].check("cpu")


def test_the_compiler_is_the_one_that_inductor_chooses():
    cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")
    try:
        cpp_builder.get_cpp_compiler()
    except Exception:
        assert PROVIDERS["inductor"].check("cpu") is not None
    else:
        assert PROVIDERS["inductor"].check("cpu") is None


def test_rows_are_frozen():
    with pytest.raises(AttributeError):
        PROVIDERS["apex"].name = "x"

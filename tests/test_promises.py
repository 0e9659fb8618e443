"""The four promises, over all families and legacy nets: objects, numbers, generators, globals, undo."""

import logging
import os
import random
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import (
    CASES,
    GRADIENT,
    adamw,
    arguments,
    close,
    fast_loop,
    gradient_error,
    loss_of,
    optimize,
    outputs,
    plain_loop,
)
from torch import nn

import autofuse

every_case = pytest.mark.parametrize("name", CASES)


# --- same objects -----------------------------------------------------------------------------


def identities(model, optimizer):
    """The identity of every object that a loop may hold, and the order of every key."""
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)],
        "parameters": [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)],
        "buffers": [(name, id(b)) for name, b in model.named_buffers(remove_duplicate=False)],
        "storages": [p.data_ptr() for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "keys": list(model.state_dict()),
        "optimizer": id(optimizer),
        "state": id(optimizer.state),
        "groups": [(id(group), [id(p) for p in group["params"]]) for group in optimizer.param_groups],
        "list": id(optimizer.param_groups),
    }


@every_case
def test_same_objects_and_key_order(name):
    case = CASES[name]
    model = case.model()
    optimizer = adamw(model)
    before, kinds = identities(model, optimizer), {n: type(m) for n, m in model.named_modules()}
    step = optimize(case, model, optimizer, measure=False)
    fast_loop(case, step, 2)
    assert identities(model, optimizer) == before
    assert step.model is model and step.optimizer is optimizer
    for path, module in model.named_modules():
        assert isinstance(module, kinds[path])
        assert kinds[path].__name__ in type(module).__name__


@every_case
def test_root_keeps_its_class_and_only_norms_are_swapped(name):
    case = CASES[name]
    model = case.model()
    kinds = {n: type(m) for n, m in model.named_modules()}
    step = optimize(case, model, only=["norms"], measure=False)
    swapped = {n for n, m in model.named_modules() if type(m) is not kinds[n]}
    assert swapped and "" not in swapped
    assert swapped == {site.path for site in step.report["norms"].accepted}
    assert all(not list(model.get_submodule(path).children()) for path in swapped)


@every_case
def test_optimizer_state_dict_has_the_plain_format(name):
    case = CASES[name]
    plain, fast = case.model(), case.model()
    optimizers = adamw(plain), adamw(fast)
    plain_loop(case, plain, optimizers[0], 2)
    fast_loop(case, optimize(case, fast, optimizers[1], measure=False), 2)
    a, b = (optimizer.state_dict() for optimizer in optimizers)
    assert list(a["state"]) == list(b["state"])
    for left, right in zip(a["state"].values(), b["state"].values(), strict=True):
        assert list(left) == list(right)
        assert all(left[k].dtype == right[k].dtype and left[k].shape == right[k].shape for k in left)
        assert left["step"] == right["step"]
    assert [list(group) for group in a["param_groups"]] == [list(group) for group in b["param_groups"]]
    optimizers[0].load_state_dict(b)
    assert close(plain_loop(case, fast, optimizers[1], 1), plain_loop(case, plain, optimizers[0], 1), 1e-3)


# --- proved: loss and gradients -----------------------------------------------------------------


@every_case
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_losses_of_several_steps_equal_the_plain_loops(name, dropout):
    case = CASES[name]
    if dropout and getattr(case, "dropouts", True) == ():
        pytest.skip("this family has no dropout")
    plain, fast = case.model(dropout), case.model(dropout)
    torch.manual_seed(5)
    expected = plain_loop(case, plain, adamw(plain), 4)
    torch.manual_seed(5)
    optimizer = adamw(fast)
    step = optimize(case, fast, optimizer, measure=False)
    losses = fast_loop(case, step, 4)
    assert close(losses, expected), (losses, expected)
    assert step.report["norms"].status == "kept"
    assert step.report["optimizer"].status == "kept", step.report["optimizer"].reason
    assert step.report.counters.steps == 4


@every_case
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_equal_the_plain_steps(name, dropout):
    case = CASES[name]
    if dropout and getattr(case, "dropouts", True) == ():
        pytest.skip("this family has no dropout")
    plain, fast = case.model(dropout), case.model(dropout)
    torch.manual_seed(5)
    expected = loss_of(case, plain)
    expected.backward()
    torch.manual_seed(5)
    loss = optimize(case, fast, measure=False)(*arguments(case))
    assert close(loss.item(), expected.item())
    assert gradient_error(plain, fast) < GRADIENT


# --- random generators ---------------------------------------------------------------------------


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@every_case
def test_optimize_consumes_no_random_numbers_and_the_step_as_many_as_a_plain_one(name):
    case = CASES[name]
    model, plain = case.model(0.1), case.model(0.1)
    optimizer = adamw(model)
    before = generators()
    step = optimize(case, model, optimizer, measure=False)
    assert generators() == before
    step(*arguments(case))
    after = generators()
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
    loss_of(case, plain).backward()
    assert torch.get_rng_state().tolist() == after[0]
    assert after[1:] == before[1:]


# --- no global is changed --------------------------------------------------------------------------


def flags():
    modules = (torch.backends, torch.backends.cuda, torch.backends.cuda.matmul, torch.backends.cudnn)
    names = ("allow_tf32", "fp32_precision", "benchmark", "deterministic", "enabled")
    found = {}
    for module in (*modules, torch.backends.cudnn.conv, torch.backends.mkldnn, torch.backends.mkldnn.matmul):
        for name in names:
            value = getattr(module, name, None)
            found[f"{module}.{name}"] = value if isinstance(value, (bool, str)) else None
    return found


def global_state():
    """Everything of the process and of the libraries that somebody might have patched."""
    classes = [c for c in vars(nn).values() if isinstance(c, type)]
    return {
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "flags": flags(),
        "F": dict(vars(F)),
        "torch": {k: v for k, v in vars(torch).items() if callable(v)},
        "Tensor": dict(vars(torch.Tensor)),
        "nn": {k: v for k, v in vars(nn).items() if isinstance(v, type)},
        "forwards": {c: dict(vars(c)) for c in classes},
        "optimizers": {c: dict(vars(c)) for c in vars(torch.optim).values() if isinstance(c, type)},
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "logging": (logging.root.level, list(logging.root.handlers), torch._logging._internal.log_state),
        "hooks": (sys.excepthook, sys.displayhook, list(sys.meta_path)),
        "module hooks": dict(nn.modules.module._global_forward_hooks),
        "Module": dict(vars(nn.Module)),
    }


@every_case
def test_no_global_is_changed(name):
    case = CASES[name]
    model = case.model()
    optimizer = adamw(model)
    loss_of(case, model).backward()  # what transformers and torch load lazily is loaded now
    optimizer.zero_grad()
    kinds = {type(m): dict(vars(type(m))) for m in model.modules()}
    before = global_state()
    step = optimize(case, model, optimizer, measure=False)
    for moment in ("optimize", "step"):
        for what, value in global_state().items():
            assert value == before[what], f"{what} after {moment}"
        assert all(dict(vars(kind)) == namespace for kind, namespace in kinds.items())
        if moment == "optimize":
            step(*arguments(case))


# --- undoable ------------------------------------------------------------------------------------


def shape_of(model, optimizer):
    """Every class and attribute of the modules and of the optimizer."""
    modules = {}
    for path, module in model.named_modules():
        values = {}
        for key, value in vars(module).items():
            plain = isinstance(value, (int, float, bool, str, bytes, type(None), tuple))
            values[key] = value if plain else (id(value), list(value) if isinstance(value, dict) else None)
        modules[path] = (type(module), list(vars(module)), values)
    groups = [
        [(key, [id(p) for p in value] if key == "params" else value) for key, value in group.items()]
        for group in optimizer.param_groups
    ]
    return modules, type(optimizer), sorted(vars(optimizer)), groups, list(optimizer.defaults.items())


@every_case
@pytest.mark.parametrize("steps", [0, 2])
def test_undo_restores_every_class_and_attribute(name, steps):
    case = CASES[name]
    model = case.model()
    optimizer = adamw(model)
    before = shape_of(model, optimizer)
    step = optimize(case, model, optimizer, measure=False)
    assert shape_of(model, optimizer) != before
    fast_loop(case, step, steps)
    autofuse.undo(model) if steps else step.undo()
    assert shape_of(model, optimizer) == before


@every_case
def test_training_goes_on_after_undo_as_the_plain_loop_would(name):
    case = CASES[name]
    plain, fast = case.model(), case.model()
    expected = plain_loop(case, plain, adamw(plain), 4)
    step = optimize(case, fast, adamw(fast), measure=False)
    losses = fast_loop(case, step, 2)
    step.undo()
    losses += [step(*arguments(case, number)).item() for number in (2, 3)]
    assert close(losses, expected)


@every_case
def test_undo_right_after_optimize_is_bit_exact(name):
    case = CASES[name]
    plain, fast = case.model(), case.model()
    optimizers = adamw(plain), adamw(fast)
    optimize(case, fast, optimizers[1], measure=False).undo()
    assert plain_loop(case, plain, optimizers[0], 3) == plain_loop(case, fast, optimizers[1], 3)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fast.parameters(), strict=True))


# --- outside training ----------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_outputs_in_evaluation_are_bit_equal(name, context):
    case = CASES[name]
    model, plain = case.model(), case.model()
    fast_loop(case, optimize(case, model, adamw(model), measure=False), 2)
    plain.load_state_dict(model.state_dict())
    with context():
        expected, found = outputs(case, plain.eval()), outputs(case, model.eval())
    assert expected and expected.keys() == found.keys()
    for path, tensor in expected.items():
        assert type(found[path]) is type(tensor) and found[path].dtype == tensor.dtype
        assert torch.equal(found[path], tensor), path


@every_case
def test_outputs_in_evaluation_with_gradients_and_in_training(name):
    case = CASES[name]
    model, plain = case.model(), case.model()
    optimize(case, model, measure=False)(*arguments(case))
    loss_of(case, plain)  # a forward in training: BatchNorm's statistics move
    for mode in (False, True):
        found, expected = outputs(case, model.train(mode)), outputs(case, plain.train(mode))
        for path, tensor in expected.items():
            assert found[path].dtype == tensor.dtype and found[path].requires_grad == tensor.requires_grad
            torch.testing.assert_close(found[path], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if getattr(case, "generates", False)])
@pytest.mark.parametrize("sampled", [False, True])
def test_generate_gives_the_same_tokens(name, sampled):
    case = CASES[name]
    model, plain = case.model(), case.model()
    fast_loop(case, optimize(case, model, adamw(model), measure=False), 1)
    plain.load_state_dict(model.state_dict())
    tokens = []
    for each in (plain.eval(), model.eval()):
        torch.manual_seed(3)
        inputs = case.batch()["input_ids"]
        arguments = {"max_new_tokens": 5, "do_sample": sampled, "output_scores": True}
        tokens.append(each.generate(inputs, return_dict_in_generate=True, **arguments))
    assert torch.equal(tokens[0].sequences, tokens[1].sequences)
    assert all(torch.equal(a, b) for a, b in zip(tokens[0].scores, tokens[1].scores, strict=True))

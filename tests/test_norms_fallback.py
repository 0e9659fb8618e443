"""The norms' second form: under autocast the output is as wide as the unpatched module's."""

import functools

import pytest
import torch
import torch.nn.functional as F
from norm_zoo import ACCEPTED, SIZE
from test_norms import Holder, data

import autofuse
from autofuse import Hardware
from autofuse.functional import layer_norm as layer_norm_file
from autofuse.functional import rms_norm as rms_norm_file
from autofuse.patch import Context
from autofuse.precision import step_autocast
from autofuse.proof import compare, evaluate
from patchers import norms

BF16 = torch.bfloat16


def under_autocast(loss_of):
    with torch.autocast("cpu", BF16), step_autocast(BF16):
        return loss_of()


def found(model):
    return norms.find(Context(model, (), Hardware.named("A100")))


def bert():
    """Post-norm: the output of a norm is the residual stream itself."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForMaskedLM(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def test_bert_rejects_the_first_form_and_proves_the_second():
    model = bert()
    ids = torch.randint(100, (4, 24))
    loss_of = functools.partial(lambda **batch: model(**batch).loss, input_ids=ids, labels=ids)
    run = functools.partial(
        evaluate, functools.partial(under_autocast, loss_of), model, list(model.parameters())
    )
    reference = evaluate(loss_of, model, list(model.parameters()))
    unpatched = run()
    own = compare(reference, unpatched)
    first = found(model)
    first.apply()
    error = compare(reference, run())
    first.undo()
    assert not error.within(own, BF16) and error.gradients > 1.5 * own.gradients
    second = first.fallback()
    second.apply()
    error = compare(reference, run())
    assert error.within(own, BF16)
    assert compare(unpatched, run()).loss <= 1e-6 and error.gradients <= 1.01 * own.gradients
    assert [site.path for site in second.sites] == [site.path for site in first.sites]
    assert {site.operation for site in second.accepted} == {"layer_norm (output as wide as before)"}
    assert {site.operation for site in first.accepted} == {"layer_norm"} and second.fallback is None
    second.undo()
    assert {type(model.get_submodule(site.path)) for site in second.sites} == {torch.nn.LayerNorm}


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_norm_gives_the_dtype_and_the_numbers_of_the_original(name):
    torch.manual_seed(0)
    model = Holder(ACCEPTED[name][0]())
    seen = []
    model.norm.register_forward_hook(lambda _, args, output: seen.append((args[0].dtype, output)))
    inputs, targets = data()

    def gradients():
        loss = under_autocast(lambda: F.mse_loss(model(inputs).float(), targets))
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients()
    patch = found(model).fallback()
    patch.apply()
    found_gradients = gradients()
    (dtype, original), (_, fused) = seen
    assert dtype == BF16 and fused.dtype == original.dtype
    assert (fused - original).norm() <= 1e-2 * original.norm()  # some originals round half-way to bf16
    for a, b in zip(expected, found_gradients, strict=True):
        assert (a - b).norm() <= 2e-2 * a.norm() + 1e-6


def test_it_is_compiled_into_one_graph():
    graphs = []
    model = Holder(torch.nn.LayerNorm(SIZE))
    found(model).fallback().apply()
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    inputs, _ = data()
    expected = under_autocast(lambda: model(inputs))
    assert torch.equal(under_autocast(lambda: compiled(inputs)), expected) and len(graphs) == 1


@pytest.mark.parametrize("second", [False, True])
def test_a_saved_plan_finds_its_form_again(second, tmp_path):
    model = bert()
    plan = autofuse.plan(model, precision="bf16")
    first = plan.patches["norms"]
    plan["norms"].sites = sites = (first.fallback() if second else first).sites
    plan.save(tmp_path / "plan.json")
    step = autofuse.optimize(model, plan=tmp_path / "plan.json")
    assert step.plan["norms"].accepted == [site for site in sites if site.accepted]
    assert step.plan.patches["norms"].fallback is None


def test_a_wider_output_is_not_rounded_on_the_way():
    x, weight = torch.randn(4, SIZE).to(BF16), torch.randn(SIZE)
    wide = layer_norm_file.layer_norm(x, (SIZE,), weight, weight, out_dtype=torch.float32)
    torch.testing.assert_close(wide, F.layer_norm(x.float(), (SIZE,), weight, weight), rtol=0, atol=0)
    expected = F.rms_norm(x.float(), (SIZE,), weight, 1e-6)
    for kernel in (rms_norm_file._torch, rms_norm_file._native):
        for scale in (weight, weight.to(BF16)):
            wide = kernel(x, [SIZE], scale, 1e-6, 0.0, torch.float32)
            expected = F.rms_norm(x.float(), (SIZE,), scale.float(), 1e-6)
            torch.testing.assert_close(wide, expected, rtol=1e-5, atol=1e-6)


def test_with_others_the_second_form_is_proved_in_one_run_more(monkeypatch):
    runs = []
    monkeypatch.setattr("autofuse.proving.evaluate", lambda *args: runs.append(1) or evaluate(*args))
    model, ids = bert(), torch.randint(100, (4, 24))
    optimizer = torch.optim.AdamW(model.parameters())
    kept = ["precision", "norms", "attention"]
    step = autofuse.optimize(model, optimizer, precision="bf16", compile=False, measure=False, only=kept)
    step({"input_ids": ids, "labels": ids})
    assert len(runs) == 4  # as it was, in bf16, with all first forms, with all second forms
    row = step.report["norms"]
    assert [step.report[name].status for name in kept] == ["kept"] * 3 and row.error is not None
    assert "in another form: together with all others it changes the result" in row.reason
    assert {site.operation for site in row.accepted} == {"layer_norm (output as wide as before)"}
    assert (
        step.report["attention"].error == row.error and "another form" not in step.report["attention"].reason
    )
    step.undo()
    assert {type(model.get_submodule(site.path)) for site in row.sites} == {torch.nn.LayerNorm}


def test_where_the_second_forms_fail_too_each_patch_is_proved_by_itself(monkeypatch):
    model, ids = bert(), torch.randint(100, (4, 24))
    step = autofuse.optimize(
        model, None, precision="bf16", compile=False, measure=False, only=["precision", "norms", "attention"]
    )
    patch = step.plan.patches["attention"]
    change = patch._change

    def wrong(transaction, sites):
        change(transaction, sites)
        head = model.cls.predictions.decoder
        transaction.set_attribute(head, "forward", lambda x: 2 * torch.nn.Linear.forward(head, x))

    monkeypatch.setattr(patch, "_change", wrong)
    step({"input_ids": ids, "labels": ids})
    assert [step.report[n].status for n in ("precision", "norms", "attention")] == [
        "kept",
        "kept",
        "rejected",
    ]
    assert "changes the result" in step.report["attention"].reason
    assert "(in another form: it changes the result" in step.report["norms"].reason

"""What optimize() and plan() take for a model, an optimizer, a loss and hardware, and what they refuse."""

import pytest
import torch
from torch import nn

import autofuse


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x, labels=None):
        return {"loss": self.norm(self.layer(x)).square().mean()}


def test_a_class_is_no_instance():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"not the class Net: make an instance, Net\(...\)"):
        autofuse.optimize(Net, optimizer)
    with pytest.raises(TypeError, match="not the class AdamW: make an instance"):
        autofuse.optimize(model, torch.optim.AdamW)
    with pytest.raises(TypeError, match="not the class CrossEntropyLoss: make an instance"):
        autofuse.optimize(model, optimizer, loss_fn=nn.CrossEntropyLoss)
    with pytest.raises(TypeError, match="not the class StepLR: make an instance"):
        autofuse.optimize(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR)
    with pytest.raises(TypeError, match="not int"):
        autofuse.optimize(3, optimizer)


def test_hardware_may_be_a_name():
    named = autofuse.plan(Net(), hardware=autofuse.Hardware.named("H100"))
    assert autofuse.plan(Net(), hardware="h100") == named
    with pytest.raises(ValueError, match="unknown hardware 'H101'"):
        autofuse.plan(Net(), hardware="H101")
    with pytest.raises(TypeError, match=r"hardware must be an autofuse.Hardware or the name of one, not int"):
        autofuse.plan(Net(), hardware=100)
    with pytest.raises(TypeError, match="not None"):
        autofuse.Hardware.named(None)


def make_trainer(tmp_path, **options):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), report_to=[], max_steps=3, use_cpu=True, disable_tqdm=True
    )
    return transformers.Trainer(Net(), arguments, **options)


def test_the_plan_of_a_trainer_is_that_of_its_model_and_optimizer(tmp_path):
    trainer = make_trainer(tmp_path)
    before = {name: value for name, value in vars(trainer).items() if name != "callback_handler"}
    plan = autofuse.plan(trainer, hardware="A100", accumulate=1, measure=True)
    assert {name: value for name, value in vars(trainer).items() if name != "callback_handler"} == before
    assert plan.model == "Net" and plan["norms"].accepted and type(trainer.model.norm) is nn.LayerNorm
    assert plan["optimizer"].sites[0].path.startswith("optimizer")
    with pytest.raises(ValueError, match="with a Trainer accumulate is the Trainer's own"):
        autofuse.plan(trainer, accumulate=2)
    with pytest.raises(ValueError, match="with a Trainer optimizer is the Trainer's own"):
        autofuse.plan(trainer, torch.optim.SGD(trainer.model.parameters()))
    with pytest.raises(TypeError, match="not epochs"):
        autofuse.plan(trainer, epochs=2)
    made = trainer.create_optimizer()
    assert autofuse.plan(trainer, hardware="A100").rows == plan.rows and trainer.optimizer is made

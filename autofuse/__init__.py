"""autofuse: one line makes a PyTorch training loop faster, and says what it did.

step = autofuse.optimize(model, optimizer)
for batch in loader:
    loss = step(batch)
print(step.report)
"""

from autofuse.hardware import Hardware
from autofuse.nn import FusedLayerNorm, FusedRMSNorm
from autofuse.optim import FusedAdam
from autofuse.optimize import optimize, plan, undo
from autofuse.plan import Plan
from autofuse.report import Report
from autofuse.step import TrainingStep

__version__ = "0.1.0"

__all__ = [
    "FusedAdam",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "Hardware",
    "Plan",
    "Report",
    "TrainingStep",
    "optimize",
    "plan",
    "undo",
]

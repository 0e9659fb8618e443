"""Compiled regions in loops that take more than one backward."""

import pytest
import torch
from test_compile import Net, batch, found
from torch import nn

import autofuse


def test_the_graph_can_be_kept_for_a_second_backward() -> None:
    net, before = Net(2), torch._functorch.config.donated_buffer
    patch = found(net)
    patch.apply()
    loss = net(batch()).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [2 * grad for grad in once])
    assert len(patch.accepted) == 2
    patch.undo()
    assert torch._functorch.config.donated_buffer == before


def test_the_setting_stays_until_the_last_model_is_undone() -> None:
    before = torch._functorch.config.donated_buffer
    first, second = found(Net(2)), found(Net(2))
    for patch in (first, second):
        patch.apply()
    first.undo()
    assert torch._functorch.config.donated_buffer is False
    second.undo()
    assert torch._functorch.config.donated_buffer == before


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss_of(critic: nn.Module, x: torch.Tensor, penalty: bool = True) -> torch.Tensor:
    y = critic(x)
    loss = (y - 1).square().mean()
    if penalty:
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = loss + (grad.norm(dim=1) - 1).square().mean()
    return loss


def penalty_loop(penalty_from: int, step_of=None) -> tuple[list[float], object]:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    critic = Critic()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    step = None if step_of is None else step_of(critic, optimizer)
    losses = []
    for number in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).requires_grad_()
        if step is None:
            loss = loss_of(critic, x, number >= penalty_from)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with step.autocast():
                loss = loss_of(critic, x, number >= penalty_from)
            step.backward(loss)
            step.update()
        losses.append(loss.item())
    return losses, step


def compiled(critic: nn.Module, optimizer: torch.optim.Optimizer) -> autofuse.TrainingStep:
    return autofuse.optimize(
        critic, optimizer, compile=True, precision="fp32", only=["compile"], measure=False
    )


def test_a_gradient_penalty_in_pieces_falls_back_to_eager() -> None:
    expected, _ = penalty_loop(0)
    losses, step = penalty_loop(0, compiled)
    assert losses == pytest.approx(expected, rel=1e-5)
    row = step.report["compile"]
    assert row.status == "rejected" and "create_graph" in row.reason


def test_a_penalty_that_comes_later_undoes_compile_and_says_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        penalty_loop(3, compiled)
    assert "autofuse has undone compile" in caught.value.__notes__[0]


def test_a_penalty_in_a_forward_is_done_again_without_compile() -> None:
    torch.manual_seed(0)
    plain, fast = Critic(), Critic()
    fast.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.0)
    step = autofuse.optimize(
        fast, optimizer, forward=loss_of, compile=True, precision="fp32", only=["compile"], measure=False
    )
    x = torch.randn(4, 8).requires_grad_()
    assert step(x).item() == pytest.approx(loss_of(plain, x).item(), rel=1e-5)
    assert step.report["compile"].status == "rejected"

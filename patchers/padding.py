"""The `padding` patch: columns that are padding in every row are trimmed, rows are packed together.

It acts on mappings with an ``attention_mask`` (an encoder-decoder's decoder side also goes by its
labels), in three steps: columns at the right, columns at the left, and, where a fifth of what is
left is padding still, several sequences in one row. Labels that are not ignored keep their columns.
Where whole rows cannot be packed (one label for each), they are for the repeated blocks alone.

**Proof.** The first batch may have no padding at all. So a change is proved, loss and all gradients
and the outputs of the real tokens, in float32, the first time that its kind really occurs: the same
side, the same padding value, the same use of labels beside padding, the same way of telling the
model. A model may behave differently at other lengths (rope scaling, sliding windows, block-sparse
attention), so a proof counts only for lengths between the shortest and the longest that it compared;
and it is made again after 100, 1000, ... uses, because a gate that starts at zero hides a
mistake. What fails is not done again, and the report says why.

**Dropout.** With fewer tokens a model draws fewer random numbers, so that this step's dropout masks
and every later one would differ from the unchanged loop's: as good statistically, but not the same
numbers, and no proof can tell it from a mistake. So the patch stays off while dropout is active.

**Outputs.** Whoever reads ``outputs`` gets tensors of the size that they would have had, in the same
type and order. At padding they hold zeros, or what layers after the blocks make of zeros, which is not
what the model would have computed there. A key-value cache among them keeps its smaller size, or is
missing where rows are packed. Where attentions are asked for, rows are not packed.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from autofuse.batch import loss_from
from autofuse.packed_body import body_path, pack_body
from autofuse.packing import FEW_LENGTHS, LENGTHS, Change, decoder_tokens, pack, tokens, trim_left, trim_right
from autofuse.patch import Context, Patch, Rejected, Site, Transaction, class_name
from autofuse.probe import RandomState
from autofuse.proof import GRADIENT_TOLERANCE, Outcome, Unprovable, compare, evaluate, no_trace
from autofuse.regions import eagerly, sharded_reason

__all__ = ["find", "order"]

order = 40

Batch = Mapping[str, Any]
Restore = Callable[[Any], Any]

# What packed rows must take of the others' time for one run of each to tell that they pay.
CLEARLY = 0.8

OTHER_NUMBERS = "with fewer tokens it would draw other random numbers than without the patch"
NOTHING_SEEN = "the batch shows nothing: neither its loss nor its gradients say anything"
WORK = {
    "right": "columns that are padding in every row, at the right",
    "left": "columns that are padding in every row, at the left",
    "decoder": "the decoder's columns that are padding in every row",
    "rows": "several sequences in one row",
    "body": "several sequences in one row of the repeated blocks",
}


def find(context: Context) -> Patch | Rejected:
    """The ways of shrinking a batch; whether one holds is proved when it first occurs."""
    if sharded_reason(context.model) is not None or _processes() > 1:
        return Rejected("several processes would prove a change at different times, and wait for each other")
    if context.settings.shrink is not None:
        return Rejected("nothing more to do: batches are shrunk already")
    active = next((path for path, m in context.modules if _drops(m)), None)
    if active is not None:
        return Rejected(f"dropout is active ({active or type(context.model).__name__}): {OTHER_NUMBERS}")
    encoder_decoder = bool(getattr(getattr(context.model, "config", None), "is_encoder_decoder", False))
    names = [name for name in WORK if encoder_decoder or name != "decoder"]
    sites = [Site(name, class_name(context.model), f"shrink {WORK[name]}", "autofuse") for name in names]
    if encoder_decoder:  # each row of the decoder would have to be told which row of the encoder is its own
        sites[-2:] = [site.rejected("encoder and decoder are trimmed, not packed") for site in sites[-2:]]
    else:
        reason = _no_body(context.model)
        sites[-1] = sites[-1] if reason is None else sites[-1].rejected(reason)
    settings = context.settings

    def change(transaction: Transaction, sites: Sequence[Site]) -> None:
        transaction.set_attribute(settings, "shrink", shrinker)

    reason = "work on padding is left out; each kind of it is proved when it first occurs"
    patch = Patch(sites, change, reason=reason, timed=True, step_only=True, idle=lambda: not shrinker.used)
    shrinker = _Shrinker(context, patch, encoder_decoder)
    return patch


def _no_body(model: nn.Module) -> str | None:
    path = body_path(model)
    if path is None:
        return "the model has no one part, apart from others, that is made of repeated blocks"
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:n])) for n in range(len(names) + 1)]
    return "it is compiled, or inside of what is" if any(map(_is_compiled, around)) else None


def _processes() -> int:
    distributed = torch.distributed
    active = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if active else 1


def _is_compiled(module: nn.Module) -> bool:
    """Whether its owner has compiled it. Dynamo is slow to import: never for this."""
    return module._compiled_call_impl is not None or type(module).__module__ == "torch._dynamo.eval_frame"


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training


# The structure of outputs, and for each leaf the dimensions that a change makes smaller.
Layout = tuple[TreeSpec, list[tuple[int, ...]]]


@dataclass
class _Proved:
    """The lengths for which a kind of change was compared."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    reach: int = 0

    def covers(self, change: Change) -> bool:
        within = any(a <= change.short and change.long <= b for a, b in self.spans)
        return within and change.reach <= self.reach

    def add(self, change: Change) -> None:
        self.spans.append((change.short, change.long))
        self.reach = max(self.reach, change.reach)


class _Shrinker:
    """What `Settings.shrink` is set to: batch -> (smaller batch, context of the model's call, restore)."""

    def __init__(self, context: Context, patch: Patch, encoder_decoder: bool) -> None:
        self.used = False
        model = context.model
        self._reference = weakref.ref(model)  # a transaction holds the settings, and must not hold the model
        self._settings, self._patch, self._encoder_decoder = context.settings, patch, encoder_decoder
        self._dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        self._offsets, self._body = _first_positions(model), body_path(model)
        self._lengths = FEW_LENGTHS if any(_is_compiled(m) for _, m in context.modules) else LENGTHS
        self._handles = -1
        self._variants: dict[str, str] = {}
        self._uses: dict[str, int] = {}
        self._proved: dict[Hashable, _Proved] = {}
        self._layouts: dict[Hashable, list[Layout]] = {}

    @property
    def _model(self) -> nn.Module:
        model = self._reference()
        assert model is not None  # it is called by the model's own step
        return model

    def __call__(self, batch: Batch) -> tuple[Batch, AbstractContextManager[None], Restore]:
        first = batch
        changes: list[tuple[Hashable, Change]] = []
        inside: AbstractContextManager[None] = nullcontext()
        if not any(_drops(m) for m in self._dropouts) and not self._is_hooked():
            for name in [site.path for site in self._patch.accepted]:
                change = self._choose(name, batch, first)
                if change is not None:
                    batch = change.after
                    changes.append((self._key(name, change), change))
                    self.used = True
                    inside = change.inside(self._model)
        options = {} if batch.get("use_cache") is None else {"use_cache": batch["use_cache"]}

        def restore(outputs: Any) -> Any:
            for key, change in reversed(changes):
                outputs = self._widen(key, change, outputs, options)
            return outputs

        return batch, inside, restore

    def _is_hooked(self) -> bool:
        """Whoever looks at the tensors inside the model by a hook would see fewer tokens, in other rows.
        A hook of the model itself sees its inputs before anything is computed from them."""
        if RemovableHandle.next_id == self._handles:
            return False
        self._handles = RemovableHandle.next_id
        model = self._model
        own = type(model).__module__.split(".")[0]  # its library's hooks collect what it returns
        for path, module in model.named_modules():
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if path and any(str(getattr(hook, "__module__", "")).split(".")[0] != own for hook in hooks):
                self._patch.reject(f"a hook is registered at {path}, and would see fewer tokens")
                return True
        return False

    def _choose(self, name: str, batch: Batch, first: Batch) -> Change | None:
        """The change of this name that is proved for the batch, if there is anything to change."""
        try:
            changes = self._changes(name, batch, first)
        except Unprovable as error:
            self._patch.reject(str(error), [name])
            return None
        chosen = self._variants.get(name)
        changes = [c for c in changes if chosen is None or c.variant == chosen]
        reason = ""
        for change in changes:
            why_not = self._check(name, change)
            if why_not is None:
                self._variants[name] = change.variant
                return change
            if why_not == NOTHING_SEEN:
                return None
            reason = reason or why_not
        if reason:
            self._patch.reject(reason, [name])
        return None

    def _changes(self, name: str, batch: Batch, first: Batch) -> list[Change]:
        if name == "decoder":
            found = decoder_tokens(batch, encoder_decoder=self._encoder_decoder)
            return [] if found is None else trim_right(batch, found, self._lengths)
        found = tokens(batch, encoder_decoder=self._encoder_decoder)
        if found is None:
            return []
        if name == "right":
            return trim_right(batch, found, self._lengths)
        if name == "left":
            return trim_left(batch, found, first["attention_mask"].shape[-1], self._lengths)
        if batch.get("output_attentions") or getattr(
            getattr(self._model, "config", None), "output_attentions", False
        ):
            return []  # who sees whom in packed rows is nobody's business
        if name == "rows":
            changes = pack(batch, found, self._offsets, self._lengths)
        else:
            changes = pack_body(batch, found, str(self._body), self._offsets, self._lengths)
        if not self._has_cache():
            return changes
        # A cache of packed rows would be of no use, and positions of packed rows are read without one only.
        return [
            replace(c, before={**c.before, "use_cache": False}, after={**c.after, "use_cache": False})
            for c in changes
        ]

    def _has_cache(self) -> bool:
        return "use_cache" in inspect.signature(self._model.forward).parameters or hasattr(
            getattr(self._model, "config", None), "use_cache"
        )

    # --- the proof ---------------------------------------------------------------------------

    def _check(self, name: str, change: Change) -> str | None:
        """None if the change is proved, by now or before, else why it is not."""
        key = self._key(name, change)
        proved = self._proved.setdefault(key, _Proved())
        uses = self._uses[name] = self._uses.get(name, 0) + 1
        again = uses >= 100 and str(uses).strip("0") == "1"
        if proved.covers(change) and not again:
            return None
        try:
            reason = self._prove(
                key, change, timed=name in ("rows", "body") and self._patch.timed and not proved.spans
            )
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = f"it cannot be proved: {type(error).__name__}: {lines[0] if lines else ''}"
        if reason is None:
            proved.add(change)
        return reason

    def _key(self, name: str, change: Change) -> Hashable:
        return name, change.variant, change.kind, self._model.training, tuple(sorted(change.before))

    def _prove(self, key: Hashable, change: Change, timed: bool) -> str | None:
        with _full_precision(self._model), eagerly():
            a, outputs, random = self._run(change.before)
            b, smaller, smaller_random = self._run(change.after, change)
            if not _same_state(random, smaller_random):
                return f"dropout is active: {OTHER_NUMBERS}"
            if not a.says_something:
                return NOTHING_SEEN
            error = compare(a, b)
            if not error.within():
                return f"it changes the result: {error}"
            layout = _layout(change, outputs, smaller)
            error_of_outputs = _outputs_error(change, outputs, smaller, layout)
            if not error_of_outputs <= GRADIENT_TOLERANCE:
                return (
                    f"it changes the outputs of real tokens: they differ by {error_of_outputs:.1e} relative"
                )
        if timed and (reason := self._slower(change)):
            return reason
        self._layouts[key] = [layout]
        return None

    def _run(self, batch: Batch, change: Change | None = None) -> tuple[Outcome, Any, RandomState]:
        """A step on the batch, its outputs, and the random generators after its forward."""
        seen: list[Any] = []

        def loss_of() -> Tensor:
            outputs = self._call(batch, change)
            loss = loss_from(outputs, self._model)
            seen[:] = [_detached(outputs), RandomState.capture()]
            return loss

        outcome = evaluate(loss_of, self._model, [p for p in self._model.parameters() if p.requires_grad])
        return outcome, *seen

    def _call(self, batch: Batch, change: Change | None) -> Any:
        with nullcontext() if change is None else change.inside(self._model):
            return self._model(**batch)

    def _slower(self, change: Change) -> str | None:
        """Why the change does not pay, in the precision of the step."""
        kind, dtype = _device_type(self._model), self._settings.autocast_dtype
        with eagerly(), torch.autocast(kind, dtype=dtype, enabled=dtype is not None), torch.enable_grad():
            before = after = float("inf")
            for _ in range(2):
                after = min(after, self._run(change.after, change)[0].seconds)  # the first is cold
                before = min(before, self._run(change.before)[0].seconds)
                if after < CLEARLY * before:
                    break
        if after < before:
            return None
        return f"it does not pay: {after * 1e3:.1f} ms with it and {before * 1e3:.1f} ms without"

    # --- what is read afterwards -------------------------------------------------------------

    def _widen(self, key: Hashable, change: Change, outputs: Any, options: Batch) -> Any:
        """The outputs of the smaller batch, with the sizes that the larger one's would have had."""
        leaves, spec = tree_flatten(outputs)
        layouts = self._layouts[key]
        if spec not in [known for known, _ in layouts]:  # other outputs are asked for than in the proof
            before, after = {**change.before, **options}, {**change.after, **options}
            with no_trace(self._model), torch.no_grad():
                layout = _layout(change, self._call(before, None), self._call(after, change))
            layouts.append(layout)
        dims = next(dims for known, dims in layouts if known == spec)
        wide = [change.widen(leaf, d) if d else leaf for leaf, d in zip(leaves, dims, strict=True)]
        return tree_unflatten(wide, spec)


def _first_positions(model: nn.Module) -> list[int]:
    """Where a model may start to count positions: at 0, or after the padding index of an embedding."""
    paddings = {
        m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None
    }
    return [0, *sorted(index + 1 for index in paddings)]


@contextmanager
def _full_precision(model: nn.Module) -> Iterator[None]:
    """Float32 without autocast and TF32, so that a mistake is not taken for rounding."""
    flags, transaction = torch.backends.cuda.matmul, Transaction()
    try:
        if flags.allow_tf32:
            transaction.set_attribute(flags, "allow_tf32", False)
    except RuntimeError:  # it contradicts the newer flag, which can be read
        if flags.fp32_precision == "tf32":
            transaction.set_attribute(flags, "fp32_precision", "ieee")
    try:
        with torch.autocast(_device_type(model), enabled=False), torch.enable_grad():
            yield
    finally:
        transaction.rollback()


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def _detached(outputs: Any) -> Any:
    leaves, spec = tree_flatten(outputs)
    return tree_unflatten([x.detach() if isinstance(x, Tensor) else x for x in leaves], spec)


def _same_state(a: RandomState, b: RandomState) -> bool:
    return torch.equal(a.torch, b.torch) and all(map(torch.equal, a.cuda, b.cuda)) and a.python == b.python


def _layout(change: Change, outputs: Any, smaller: Any) -> Layout:
    leaves, spec = tree_flatten(outputs)
    small_leaves, small_spec = tree_flatten(smaller)
    if spec != small_spec:
        raise Unprovable("the outputs have another structure")
    if spec.is_leaf() and not isinstance(outputs, Tensor):
        raise Unprovable(f"outputs of type {type(outputs).__name__} cannot be given their full size")
    dims = [
        change.layout(a, b) if isinstance(a, Tensor) else ()
        for a, b in zip(leaves, small_leaves, strict=True)
    ]
    return spec, dims


def _outputs_error(change: Change, outputs: Any, smaller: Any, layout: Layout) -> float:
    """The largest relative difference of an output, at real tokens where it has an entry for each."""
    worst = 0.0
    for a, b, dims in zip(tree_flatten(outputs)[0], tree_flatten(smaller)[0], layout[1], strict=True):
        if not isinstance(a, Tensor) or not a.is_floating_point() or dims not in ((), (1,), (0, 1)):
            continue
        for_tokens = a.shape[:2] == change.real.shape
        if dims and not for_tokens:
            continue
        if dims or (for_tokens and a.dim() > 2):  # packed inside, it has its size, and is zero at padding
            a, b = a[change.real].float(), change.widen(b, dims)[change.real].float()
        if not a.isfinite().all():
            continue
        norm = float(a.norm())
        worst = max(worst, float((a - b).norm()) / norm if norm else float(b.norm()))
    return worst

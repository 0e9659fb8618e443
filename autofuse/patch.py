"""The one idea of autofuse: a `Patch`, a change that can be applied, proved and taken back.

A *patcher* is a module with a function ``find(context) -> Patch | Rejected``, registered in the
entry-point group ``autofuse.patchers``; the entry point's name is the name of its patch. A patcher
looks and never touches: everything that changes goes through the `Transaction` that
`Patch.apply` hands to ``change``, so that `Patch.undo` restores every class, attribute and item.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from autofuse.hardware import Hardware

__all__ = [
    "Context",
    "Patch",
    "Rejected",
    "Settings",
    "Site",
    "Transaction",
    "class_name",
    "fused_class",
]

_MISSING = object()

# Modules whose recognition no longer holds: a patch that is applied again leaves them alone.
given_up: weakref.WeakSet[nn.Module] = weakref.WeakSet()

# Settings of the process that are held: (object, name) -> (value before, how many hold it).
_held: dict[tuple[int, str], tuple[Any, int]] = {}

# Optimizer steps to come, where nobody says how many.
ASSUMED_STEPS = 1000


@dataclass(frozen=True)
class Rejected:
    """A place, or a whole kind of change, that is left alone, and why."""

    reason: str


@dataclass(frozen=True)
class Site:
    """One place that was looked at: accepted if it has an ``operation``, else left alone.

    >>> Site("h.0.ln_1", "torch.nn.LayerNorm", operation="layer_norm", provider="torch").accepted
    True
    >>> Site("h.0.norm", "net.Norm", reason="its output depends on a global").accepted
    False
    """

    path: str
    cls: str
    operation: str | None = None
    provider: str | None = None
    reason: str = ""

    @property
    def accepted(self) -> bool:
        return self.operation is not None

    def rejected(self, reason: str) -> Site:
        """The same place, left alone for ``reason``."""
        return replace(self, operation=None, provider=None, reason=reason)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Transaction:
    """Changes that can be taken back, the last one first.

    >>> class Box: value = 1
    >>> box, transaction = Box(), Transaction()
    >>> transaction.set_attribute(box, "value", 2)
    >>> transaction.rollback()
    >>> box.value, vars(box)
    (1, {})
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self.open = True

    def on_undo(self, function: Callable[[], object]) -> None:
        """Call ``function`` when the transaction is rolled back."""
        self._undo.append(function)

    def _on_undo_of(self, obj: Any, restore: Callable[[Any], object]) -> None:
        """Call ``restore(obj)`` at rollback, without keeping a module alive until then."""
        if isinstance(obj, nn.Module):
            reference = weakref.ref(obj)
            self.on_undo(lambda: None if (alive := reference()) is None else restore(alive))
        else:
            self.on_undo(lambda: restore(obj))

    def set_attribute(self, obj: Any, name: str, value: Any) -> None:
        own = getattr(obj, "__dict__", {})
        before = own.get(name, _MISSING)
        inherited = getattr(obj, name, _MISSING) if before is _MISSING else _MISSING
        setattr(obj, name, value)
        if before is not _MISSING:
            self._on_undo_of(obj, lambda o: setattr(o, name, before))
        elif name in getattr(obj, "__dict__", {}) or inherited is _MISSING:
            self._on_undo_of(obj, lambda o: delattr(o, name) if name in vars(o) else None)
        else:  # a property: its setter is the way back
            self._on_undo_of(obj, lambda o: setattr(o, name, inherited))

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        before = mapping.get(key, _MISSING)
        mapping[key] = value
        if before is _MISSING:
            self.on_undo(lambda: mapping.pop(key, None))
        else:
            self.on_undo(lambda: mapping.__setitem__(key, before))

    def hold(self, obj: Any, name: str, value: Any) -> None:
        """Set an attribute that the whole process reads, for as long as anybody holds it at that value:
        several models may, and be undone in any order.

        >>> class Settings: exact = True
        >>> one, other = Transaction(), Transaction()
        >>> for transaction in (one, other):
        ...     transaction.hold(Settings, "exact", False)
        >>> one.rollback()
        >>> Settings.exact
        False
        >>> other.rollback()
        >>> Settings.exact
        True
        """
        key = id(obj), name
        before, holders = _held.get(key, (getattr(obj, name), 0))
        _held[key] = before, holders + 1
        setattr(obj, name, value)

        def release() -> None:
            before, holders = _held.pop(key)
            if holders > 1:
                _held[key] = before, holders - 1
            else:
                setattr(obj, name, before)

        self.on_undo(release)

    def set_class(self, obj: Any, cls: type) -> None:
        if isinstance(obj, nn.Module) and obj in given_up:
            return
        before = type(obj)
        obj.__class__ = cls

        def restore(o: Any) -> None:
            if type(o) is cls:  # else it gave the change up itself, or somebody swapped on top
                o.__class__ = before

        self._on_undo_of(obj, restore)

    def rollback(self) -> None:
        """Take everything back. Goes on past a failing entry and raises the first error at the end."""
        self.open = False
        error: Exception | None = None
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as exception:
                error = error or exception
        if error is not None:
            raise error


class Patch:
    """One kind of change, with its places.

    Args:
        sites: every place that was looked at, accepted or not.
        change: ``change(transaction, sites)`` makes the change at the accepted sites given.
        reason: why the patch is made, or why it has no accepted site.
        exact: the patched step gives the unpatched step's numbers up to rounding at the same
            precision. False for the changes of precision themselves.
        in_forward: the change shows in the loss and the gradients of a step, and is proved there.
            False for what acts later (the optimizer) and is proved by its patcher.
        blames: for a change whose gradients cannot be differentiated again (``create_graph=True``):
            whether an error that comes out of the caller's loop is of the change's making.
        step_only: the change acts in ``step(batch)`` alone, not where the caller calls the model.
        timed: it may look for itself, on the user's own batches, whether it makes them faster.
        forced: the user has asked for it: it is kept if it is proved, whatever its time.
        worth: the share of a step's time that it must save to be kept, for what it costs elsewhere.
        pays: for a change with a price (compile): ``pays(step_seconds)`` is asked with the time of
            an unpatched step before the change is applied; it returns a `Rejected` when not.
        fallback: another form of the same change, tried where this one fails its proof.
        upgrade: a dearer form of the same change, asked for with the seconds of a step once this
            one is kept; it returns a `Rejected` where it would not pay.
        idle: whether it has had nothing to do so far, so that nothing about it could be timed.
        lasting: undoing it does not bring the time of a step back to what it was before, so that steps
            without it afterwards tell little.
        in_modules: the change is one of many small ones inside modules. Each may win alone and
            lose inside a compiled region, so that it is tried without once one is there.
        encloses: the change runs modules as one (compile): those inside are tried again after it.
    """

    def __init__(
        self,
        sites: Iterable[Site],
        change: Callable[[Transaction, Sequence[Site]], None] | None = None,
        *,
        reason: str = "",
        exact: bool = True,
        in_forward: bool = True,
        blames: Callable[[Exception], bool] | None = None,
        step_only: bool = False,
        timed: bool = False,
        forced: bool = False,
        worth: float = 0.0,
        pays: Callable[[float], Rejected | None] | None = None,
        fallback: Callable[[], Patch | Rejected] | None = None,
        upgrade: Callable[[float], Patch | Rejected] | None = None,
        idle: Callable[[], bool] | None = None,
        lasting: bool = False,
        in_modules: bool = False,
        encloses: bool = False,
    ) -> None:
        self.name = ""  # the registry's name for it: the entry point's
        self.sites = list(sites)
        self.reason = reason
        self.exact = exact
        self.in_forward = in_forward
        self.blames = blames
        self.step_only = step_only
        self.timed = timed
        self.forced = forced
        self.worth = worth
        self.pays = pays
        self.fallback = fallback
        self.upgrade = upgrade
        self.idle = idle
        self.lasting = lasting
        self.in_modules = in_modules
        self.encloses = encloses
        self._change = change
        self._transaction: Transaction | None = None

    def __repr__(self) -> str:
        return (
            f"Patch({self.name!r}, {len(self.accepted)} of {len(self.sites)} sites, applied={self.applied})"
        )

    @property
    def accepted(self) -> list[Site]:
        return [site for site in self.sites if site.accepted]

    @property
    def applied(self) -> bool:
        return self._transaction is not None and self._transaction.open

    def apply(self) -> Transaction | None:
        """Make the change; if it raises half-way, everything is as before and the error is raised.

        Returns the transaction that takes it back, or None where there is nothing to do.
        """
        if self.applied or self._change is None or not self.accepted:
            return None
        transaction = Transaction()
        try:
            self._change(transaction, self.accepted)
        except BaseException:
            transaction.rollback()
            raise
        self._transaction = transaction
        return transaction

    def undo(self) -> None:
        """Take the change back; nothing to do if it is not applied."""
        if self._transaction is not None and self._transaction.open:
            self._transaction.rollback()

    def reject(self, reason: str, paths: Iterable[str] | None = None) -> None:
        """Leave all sites alone, or those at ``paths``, for ``reason``. Does not undo."""
        chosen = None if paths is None else set(paths)
        self.sites = [
            site.rejected(reason) if site.accepted and (chosen is None or site.path in chosen) else site
            for site in self.sites
        ]
        if not self.accepted:
            self.reason = reason


@dataclass
class Settings:
    """What the training step does around the model; the step-level patches change it."""

    autocast_dtype: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    # batch -> (a batch with less work in it, the context in which the model is to be called with it,
    # outputs -> the outputs that the given batch would have had)
    shrink: (
        Callable[
            [Mapping[str, Any]], tuple[Mapping[str, Any], AbstractContextManager[None], Callable[[Any], Any]]
        ]
        | None
    ) = None

    @property
    def active_scaler(self) -> torch.amp.GradScaler | None:
        """The scaler where one is needed: under autocast to float16 alone."""
        return self.scaler if self.autocast_dtype == torch.float16 else None


@dataclass
class Context:
    """What a patcher may look at. It decides by ``hardware`` alone, so that plans for another
    machine can be made here."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    hardware: Hardware
    precision: str = "auto"
    compile: bool | str = "auto"
    steps: int | None = None
    settings: Settings = field(default_factory=Settings)

    @functools.cached_property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """(qualified name, module) of every module, shared ones once."""
        return list(self.model.named_modules())

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the model's parameters lie (the first one's device; CPU without any)."""
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device


def class_name(obj: object) -> str:
    """``torch.nn.LayerNorm`` rather than ``torch.nn.modules.normalization.LayerNorm``.

    >>> class_name(nn.LayerNorm(4))
    'torch.nn.LayerNorm'
    """
    cls = obj if isinstance(obj, type) else type(obj)
    if getattr(nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    if getattr(torch.optim, cls.__name__, None) is cls:
        return f"torch.optim.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


# --- the in-place class swap -------------------------------------------------------------------

# Values are weak: a class that no module uses any more goes away together with its entry.
_fused_classes: weakref.WeakValueDictionary[tuple[type, Any], type] = weakref.WeakValueDictionary()


class _Swapped:
    """What every swapped class has: it pickles as the original, and copies as itself.

    A file written with such a module loads where autofuse is not installed; an EMA copy made with
    deepcopy stays fused. Setting an attribute that the recognition took for constant gives the
    module its original class back, since the recognition no longer holds.
    """

    _autofuse_original: type
    _autofuse_live: frozenset[str]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # Not copyreg.__newobj__, whose pickler insists on the object's own class.
        return (copyreg._reconstructor, (self._autofuse_original, object, None), *reduced[2:])  # type: ignore[attr-defined]

    def __copy__(self) -> Any:
        new = copy.copy(_as(self, self._autofuse_original))
        new.__class__ = type(self)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        custom = getattr(super(), "__deepcopy__", None)
        if custom is not None:
            new = custom(memo)
        else:
            function, arguments, state, *_ = self.__reduce_ex__(4)
            new = function(*arguments)
            memo[id(self)] = new
            state = copy.deepcopy(state, memo)
            new.__setstate__(state) if hasattr(new, "__setstate__") else vars(new).update(state)
        if type(new) is self._autofuse_original:
            new.__class__ = type(self)
        return new

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.startswith("_") or name in self._autofuse_live:
            return
        if isinstance(self, nn.Module):
            given_up.add(self)
        cls, original = type(self), self._autofuse_original
        if "_autofuse_original" in vars(cls):
            self.__class__ = original
        else:  # somebody's own subclass, made on top (a parametrization): it stays, on the original
            cls.__bases__ = tuple(original if issubclass(base, _Swapped) else base for base in cls.__bases__)


def _as(obj: Any, cls: Any) -> Any:
    """A shallow stand-in of another class that shares ``obj``'s attributes."""
    new = cls.__new__(cls)
    vars(new).update(vars(obj))
    return new


def fused_class(
    original: type[nn.Module],
    key: Any,
    forward: Callable[..., Any],
    *,
    base: type[nn.Module] | None = None,
    live: Iterable[str] | None = (),
) -> type[nn.Module]:
    """The subclass of ``original`` with another ``forward``, made once per (original, key).

    ``module.__class__ = fused_class(...)`` changes a module in place: same object, same parameters,
    same ``isinstance``. ``forward`` is called as a method, with the arguments that the original's
    takes. ``key`` must say everything that ``forward`` depends on.

    Args:
        base: a public subclass of ``original`` to derive from instead (``FusedLayerNorm``).
        live: attributes that ``forward`` reads at every call and that may therefore be set freely;
            setting any other attribute gives the module its original class back. None: all may be.
    """
    cached = _fused_classes.get((original, key))
    if cached is not None:
        return cached
    name = original.__name__ if original.__name__.startswith("Fused") else f"Fused{original.__name__}"
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": name,
        "__doc__": original.__doc__,
        "forward": functools.wraps(original.forward)(forward),
        "_autofuse_original": original,
        "_autofuse_live": frozenset({"training", "forward", *(live or ())}),
    }
    if live is None:  # the original's own: Dynamo cannot trace ours
        namespace["__setattr__"] = original.__setattr__
    fused = type(name, (_Swapped, base or original), namespace)
    _fused_classes[original, key] = fused
    return fused

"""Savings: what a faster step is worth over a whole run, in hours, money, energy and CO2."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

__all__ = ["Savings", "savings_of"]


@dataclass(frozen=True)
class Savings:
    """What a run saves, less what the tuning has cost; negative where it has cost more than it won.

    Attributes:
        hours: hours that the run takes with the loop as it was.
        hours_saved: how many of them it does not take now.
        interval: the 95% confidence interval of ``hours_saved``, where the gain has one.
        money_saved: in the currency of ``price_per_hour``; None without it.
        kwh_saved: energy in kWh; None without ``kilowatts``.
        kg_co2_saved: None without ``kilowatts`` and ``grams_co2_per_kwh``.

    >>> print(Savings(24.0, 12.0, (11.0, 13.0), money_saved=36.0))
    Saves 12.00 of 24.00 hours (11.00 to 13.00) and 36.00 in money.
    """

    hours: float
    hours_saved: float
    interval: tuple[float, float] | None = None
    money_saved: float | None = None
    kwh_saved: float | None = None
    kg_co2_saved: float | None = None

    def __str__(self) -> str:
        sure = "" if self.interval is None else f" ({_text(self.interval[0])} to {_text(self.interval[1])})"
        parts = [f"{_text(self.hours_saved)} of {_text(self.hours)} hours{sure}"]
        for value, unit in (
            (self.money_saved, "in money"),
            (self.kwh_saved, "kWh"),
            (self.kg_co2_saved, "kg of CO2"),
        ):
            parts += [] if value is None else [f"{_text(value)} {unit}"]
        saved = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
        end = ": tuning has cost more than the patches win." if self.hours_saved < 0 else "."
        return f"Saves {saved}{end}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def savings_of(
    gain: float,
    interval: tuple[float, float] | None,
    *,
    hours: float,
    price_per_hour: float | None = None,
    kilowatts: float | None = None,
    grams_co2_per_kwh: float | None = None,
    tuned_hours: float = 0.0,
    extra_hours: float = 0.0,
) -> Savings:
    """The savings of a run, part of which was tuned instead of run faster.

    Args:
        gain: the share of a step's time that is saved: 0.25 is a quarter.
        interval: its 95% confidence interval.
        hours: what the run takes with the loop as it was.
        price_per_hour: of the machine, in any currency.
        kilowatts: what the machine draws while it trains.
        grams_co2_per_kwh: of the electricity.
        tuned_hours: what the steps taken while tuning would have taken with the loop as it was.
        extra_hours: what they took beyond that.

    Raises:
        ValueError: a figure is negative or not finite, or CO2 is asked for without kilowatts.

    >>> savings_of(0.25, None, hours=100, kilowatts=0.5, grams_co2_per_kwh=400).kg_co2_saved
    5.0
    """
    hours = _checked("hours", hours, "the hours that the run takes with the loop as it was")
    price = _optional("price_per_hour", price_per_hour, "what an hour of the machine costs")
    power = _optional("kilowatts", kilowatts, "what the machine draws while it trains: 0.7 for one H100")
    grams = _optional("grams_co2_per_kwh", grams_co2_per_kwh, "what the electricity emits: 50 to 800")
    if grams is not None and power is None:
        raise ValueError("grams_co2_per_kwh says what a kWh emits: give kilowatts too, to know how many kWh")

    def saved(part: float) -> float:
        return part * max(hours - tuned_hours, 0.0) - extra_hours

    won = saved(gain)
    kwh = None if power is None else won * power
    return Savings(
        hours,
        won,
        None if interval is None else (saved(interval[0]), saved(interval[1])),
        None if price is None else won * price,
        kwh,
        None if grams is None or kwh is None else kwh * grams / 1000,
    )


def _text(value: float) -> str:
    return f"{round(value, 2) + 0.0:,.2f}"  # + 0.0: no "-0.00"


def _optional(name: str, value: float | None, meaning: str) -> float | None:
    return None if value is None else _checked(name, value, meaning)


def _checked(name: str, value: float, meaning: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r}: expected a finite number that is not negative ({meaning})")
    return float(value)

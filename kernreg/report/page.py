"""The page: a report as one HTML text that refers to nothing outside itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from importlib import resources
from typing import TYPE_CHECKING

from kernreg import __version__
from kernreg.contract import format_facts
from kernreg.report import chart
from kernreg.report.data import Place, Report

if TYPE_CHECKING:
    from jinja2 import Environment

COLOURS = 8


class MissingExtra(ImportError):
    """What the page is made with is not installed."""


def page(report: Report, command: str = "", written: datetime | None = None) -> str:
    """The HTML. `command` and `written` say where it came from; without a time it is a function of the report alone.

    Raises:
        MissingExtra: Jinja is not installed.
    """
    template = _environment().get_template("page.html")
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return template.render(
        report=report,
        style=style,
        command=command,
        written=written and f"{written:%Y-%m-%d %H:%M}",
        version=__version__,
    )


def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise MissingExtra("the report needs jinja2, which is not installed: pip install 'kernreg[report]'") from error
    made = Environment(
        loader=PackageLoader("kernreg.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"draw": chart.draw, "shape": chart, "colours": COLOURS, "machine": machine}
    made.filters |= {"us": microseconds, "percent": percent, "facts": facts, "bytes": terabytes, "share": "{:.0%}".format}
    made.filters["breakable"] = lambda text: Markup("<wbr>").join(re.split(r"(?<=[\[,])", text))  # joining escapes
    return made


def microseconds(value: float) -> str:
    """To a thousandth, hundredth or tenth, by its size: what no clock shows is left out."""
    return f"{value:.1f}" if value >= 1000 else f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def percent(slowdown: float | None) -> str:
    """1.034 is +3.4 %."""
    return "-" if slowdown is None else f"{(slowdown - 1) * 100:+.1f} %"


def facts(values: Mapping[str, object]) -> str:
    return format_facts(values.items())


def terabytes(rate: float) -> str:
    return f"{rate / 1e12:g} TB/s"


def machine(place: Place) -> str:
    return str(place.device)

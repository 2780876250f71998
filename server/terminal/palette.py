"""Who said a token, in colours: those of the page."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.style import Style
from rich.text import Text

from engine.draft import registry
from server.terminal.safe import safe

#: Backgrounds of the page, those of `KNOWN` first, and the text on them.
DARK = ("#14532d", "#0c3d7a", "#6a4700", "#4b2a7a", "#7a2138", "#0b4f54")
DARK_TEXT = "#e6edf3"
LIGHT = ("#b8e6c9", "#bcd9ff", "#ffdf9e", "#e5ccff", "#ffc9d4", "#b9ebee")
LIGHT_TEXT = "#1b1f24"

#: Drafters that have a colour of their own, whoever is seen first: as in server/ui/colours.js.
KNOWN = registry.choices()[:4]

#: A guess that the model refused.
REFUSED = Style(dim=True, strike=True)


@dataclass(slots=True)
class Palette:
    """A style for each drafter; those that the page does not know share what is left, in the order
    of their appearance.

    Both colours of a style are set, so that it can be read on any background. Where there are no
    colours, guesses are underlined.

    Args:
        light: whether the terminal's background is a light one.
        colourless: whether colours are not wanted or not to be had.
    """

    light: bool = False
    colourless: bool = False
    _styles: dict[str, Style] = field(default_factory=dict)

    def of(self, drafter: str) -> Style:
        """The style of a drafter's tokens."""
        if drafter not in self._styles:
            backgrounds = LIGHT if self.light else DARK
            others = [name for name in self._styles if name not in KNOWN]
            spare = len(KNOWN) + len(others) % (len(backgrounds) - len(KNOWN))
            place = KNOWN.index(drafter) if drafter in KNOWN else spare
            self._styles[drafter] = (
                Style(underline=True)
                if self.colourless
                else Style(
                    color=LIGHT_TEXT if self.light else DARK_TEXT,
                    bgcolor=backgrounds[place],
                )
            )
        return self._styles[drafter]

    def legend(self) -> Text:
        """What the styles mean that have been used so far; empty without any."""
        line = Text()
        for name, style in self._styles.items():
            line.append(f" {safe(name)} ", style).append(" guessed it  ", "dim")
        if self._styles:
            line.append("not marked: said by the model itself", "dim")
        return line


def has_light_background(environment: Mapping[str, str] = os.environ) -> bool:
    """What COLORFGBG tells, which some terminals set; without it, dark."""
    return environment.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")

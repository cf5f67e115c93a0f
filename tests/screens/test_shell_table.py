"""The table of all screens: what is where, and what stays where it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.app import ComposeResult
from textual.content import Content
from textual.pilot import Pilot

from app.shell.base_app import MusterApp
from app.shell.base_screen import BaseScreen
from app.shell.dialogs import HelpDialog
from app.shell.folding import folded
from app.shell.keys import EVERYWHERE, Key, KeyBar, key_line
from app.shell.look import ascii_text, thumb
from app.shell.row_table import RowTable
from app.shell.text import GAP, TableColumn, TableRow, draw, header, moving_bar, widths
from tests.screens.pilot import run, text

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("C", "M", "Z")), min_size=1, max_size=60)
COLUMNS = (
    TableColumn("name", "machine", max_width=30, min_width=12), TableColumn("state", "state", min_width=8),
    TableColumn("chip", "chip", rank=1), TableColumn("about", "about", rank=2, max_width=60),
)  # fmt: skip


def rows_of(names: Iterable[str]) -> list[TableRow]:
    return [
        TableRow(f"k{place}", (Content(name), Content("ok"), Content(name[::-1]), Content("about " + name)))
        for place, name in enumerate(names)
    ]


@given(st.floats(1e-12, 1e12), st.integers(72, 160))
def test_a_figure_is_never_cut_and_columns_fall_by_worth(figure: float, room: int) -> None:
    columns = (
        TableColumn("way", "way", max_width=34, min_width=18),
        TableColumn("time", "same loss in", right=True, max_width=5, min_width=3),
        TableColumn("traffic", "traffic/h", right=True, max_width=5, min_width=3, rank=1),
        TableColumn("why", "why", max_width=90, min_width=40, rank=2),
    )  # fmt: skip
    said = f"{figure:.4g}"
    row = TableRow("a", (Content("diloco"), Content(said), Content(said), Content("because " * 9)))
    cells = widths(columns, [row], room)
    drawn = draw(columns, row, cells, room)[0].content.plain
    assert drawn.split()[1] == said and cell_len(drawn) <= room
    assert "traffic" in cells or "why" not in cells


@given(st.lists(NAMES, max_size=6), st.integers(40, 160))
def test_a_table_is_as_wide_as_its_room_and_its_first_column_is_whole(names: list[str], room: int) -> None:
    rows = rows_of(names)
    cells = widths(COLUMNS, rows, room)
    assert sum(cells.values()) + GAP * (len(cells) - 1) <= room
    assert all(line.cell_length <= room for line in header(COLUMNS, cells))
    for row, name in zip(rows, names):
        lines = draw(COLUMNS, row, cells, room)
        assert all(line.content.cell_length <= room for line in lines)
        first, *more = [line.content for line in lines]
        whole = _left(first.plain, cells["name"]) + "".join(line.plain for line in more)
        assert whole == name


def _left(text: str, cells: int) -> str:
    """The part of a line that stands in its first cells."""
    taken = ""
    for character in text:
        if cell_len(taken + character) > cells:
            break
        taken += character
    return taken.rstrip()


@given(st.text(max_size=60))
def test_ascii_takes_as_many_cells(text_: str) -> None:
    plain = ascii_text(text_)
    assert plain.isascii() and cell_len(plain) == cell_len(text_)


@given(st.integers(0, 80), st.integers(0, 500), st.integers(0, 80), st.floats(0, 500))
def test_the_thumb_stays_in_its_bar(size: int, virtual: int, window: int, position: float) -> None:
    first, last = thumb(size, virtual, window, position)
    assert 0 <= first <= last <= size
    assert (last > first) is bool(size and window and virtual > window)


def test_the_key_bar_keeps_the_main_key_and_those_of_every_screen() -> None:
    keys = (
        Key("a", "a", "Another rather long label"),
        Key("enter", "go", "Continue", main=True),
        Key("b", "b", "Short"),
    )
    line = key_line(keys, 70, EVERYWHERE).plain
    assert line.startswith("enter Continue") and line.endswith("esc Back   ? Help   ^p Palette")
    assert "b Short" in line and "Another" not in line and len(line) == 70


@given(st.lists(NAMES, min_size=1, max_size=5).map(" ".join), st.integers(2, 40))
def test_folded_lines_are_not_too_long_and_lose_nothing(line: str, width: int) -> None:
    lines = folded(line, width)
    assert all(cell_len(one) <= width for one in lines)
    assert "".join(lines).replace(" ", "") == line.replace(" ", "")


def test_a_path_is_folded_between_its_folders() -> None:
    command = "python3 cli_typer.py train demo-2 --plan profiles/saved/demo-2-machines.plan.json"
    assert folded(command, 34)[-1] == "demo-2-machines.plan.json"
    assert folded("~/.cache/muster/environments/2026-11-29", 12) == [
        "~/.cache/",
        "muster/",
        "environments",
        "/2026-11-29",
    ]


class Table(BaseScreen):
    HEADING = "Table"

    def body(self) -> ComposeResult:
        yield RowTable(COLUMNS, empty="none", id="rows")


class TableApp(MusterApp):
    def on_mount(self) -> None:
        self.push_screen(Table())


@pytest.mark.slow
def test_the_cursor_stays_on_its_row_when_rows_come_and_go() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        table = pilot.app.screen.query_one(RowTable)
        assert "none" in text(pilot.app)
        many = rows_of(f"machine{number:02}" for number in range(60))
        table.show(many)
        table.focus()
        await pilot.press(*["down"] * 40)
        assert table.cursor == "k40"
        table.show([*many[30:], *many[:30]])
        await pilot.pause()
        assert table.cursor == "k40" and "machine40" in text(pilot.app)
        table.show([*many[30:40], *many[41:], *many[:30]])
        await pilot.pause()
        assert table.cursor == "k41"  # what stands where it stood
        table.show([])
        assert table.cursor == ""

    run(TableApp(), drive)


@pytest.mark.slow
def test_what_is_cut_ends_with_an_ellipsis_beside_a_scrollbar_too() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        table = pilot.app.screen.query_one(RowTable)
        table.styles.height = "1fr"
        for count in (3, 60, 3, 60):
            rows = [TableRow(f"k{n}", (Content("name"), Content("word " * 30))) for n in range(count)]
            table.show(rows, columns=(TableColumn("name", "name"), TableColumn("about", "about", max_width=100)))
            await pilot.pause()
            await pilot.pause()
            assert table.show_vertical_scrollbar is (count == 60)
            lines = [line for line in text(pilot.app).splitlines() if "word" in line]
            assert lines and all("…" in line for line in lines)

    run(TableApp(), drive)


@pytest.mark.slow
def test_a_click_selects_a_row_and_a_click_on_a_key_presses_it() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        table = pilot.app.screen.query_one(RowTable)
        table.show(rows_of(["alpha", "beta", "gamma"]))
        await pilot.pause()
        await pilot.click(RowTable, offset=(4, 3))
        assert table.cursor == "k2"
        bar = pilot.app.screen.query_one(KeyBar)
        await pilot.click(KeyBar, offset=(bar.region.width - 18, 0))  # on "? Help"
        await pilot.pause()
        assert isinstance(pilot.app.screen, HelpDialog)

    run(TableApp(), drive)


def test_a_filter_shows_what_contains_it_and_ends_with_escape() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        table = pilot.app.screen.query_one(RowTable)
        table.show(rows_of(["alpha", "beta", "gamma"]))
        table.focus()
        table.select("k2")
        await pilot.press("slash", "M", "m")
        await pilot.pause()
        assert "gamma" in text(pilot.app) and "beta" not in text(pilot.app)
        await pilot.press("q")  # typed, not obeyed
        assert "nothing here contains 'Mmq'" in text(pilot.app)
        await pilot.press("escape")
        await pilot.pause()
        assert "alpha" in text(pilot.app) and pilot.app.focused is table

    run(TableApp(), drive)


@pytest.mark.slow
def test_q_asks_where_the_screen_has_a_question() -> None:
    class Asking(Table):
        def leave_question(self) -> str:
            return "Sure?"

    class AskingApp(MusterApp):
        def on_mount(self) -> None:
            self.push_screen(Asking())

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("q")
        await pilot.pause()
        assert "Sure?" in text(pilot.app)
        await pilot.press("escape")
        await pilot.pause()
        assert pilot.app.return_code is None
        await pilot.press("q", "enter")
        await pilot.pause()
        assert pilot.app.return_code == 0

    run(AskingApp(), drive)


@pytest.mark.slow
def test_t_goes_round_all_themes() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        seen = []
        for _ in range(5):
            await pilot.press("t")
            seen.append(pilot.app.theme)
        assert len(set(seen)) == 5 and seen[-1] == "muster-dark"

    run(TableApp(), drive)


def test_a_bar_of_unknown_share_moves_and_keeps_its_width() -> None:
    bars = [moving_bar(quarter / 4, 16) for quarter in range(16)]
    assert len(set(bars)) > 8 and {(len(one), one.count("━")) for one in bars} == {(16, 4)}
    assert (bars[0][:4], bars[-1][-4:]) == ("━━━━", "━━━━") and moving_bar(4.0, 16) == bars[0]

"""The page in a real browser: it follows its runs, fits a phone, and runs nothing that a sample holds."""

from pathlib import Path

import processes
import pytest
from chromium import MISSING, PROGRAM, Tab, chromium
from watched_runs import HOSTILE, keeps, killed_and_resumed, run_at, says, served

from rlplus.tools.watch import FollowedRun

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
PICKED = "[...document.querySelectorAll('.column .moment.on')].map((m) => m.dataset.moment)"


def has(tab: Tab, selector: str, text: str) -> bool:
    return bool(tab.run(f"document.querySelector({selector!r}).textContent.includes({text!r})"))


def test_two_runs_are_followed_side_by_side(tmp_path: Path) -> None:
    """One is killed, resumed and ends, at the desktop, on a phone and in the dark; the other one stays."""
    one, other = (run_at(tmp_path / name, 8) for name in ("one", "other"))
    for folder in (one, other):
        says(folder, written=4e9)
        for step in (4, 8):
            keeps(folder, step)
    runs = [FollowedRun(HOSTILE, one), FollowedRun("other", other)]
    with chromium(tmp_path / "browser") as tab, served(*runs) as server:
        url = server.url
        for size, dark in (("desktop", False), ("phone", False), ("phone", True), ("desktop", True)):
            tab.show(size, dark=dark)
            tab.open(url)
            width = tab.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert width == 0, f"{size} scrolls sideways by {width}"
            lightness = tab.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
            assert (lightness < 128) == dark
            places = tab.run("[...document.querySelectorAll('.card')].map((c) => c.getBoundingClientRect().top)")
            assert len(places) == 2
            assert (places[0] == places[1]) == (size == "desktop")
        assert tab.run(PICKED) == ["step 8", "step 8"]
        tab.run("document.querySelectorAll('.column')[1].querySelector('.picker button').click()")
        assert tab.run(PICKED) == ["step 8", "step 4"]
        killed_and_resumed(one, 4, 6)
        keeps(one, 6)
        keeps(other, 12)
        says(one, state="finished", share_done=1.0, step=20)
        processes.wait_until(lambda: has(tab, ".card", "finished"))
        processes.wait_until(lambda: tab.run(PICKED) == ["step 6", "step 4"])  # the newest, and what was chosen
        processes.wait_until(lambda: tab.run("document.title.startsWith('100% ')"))
        assert tab.run("document.querySelectorAll('#samples script, #samples img, #now script, #now img').length") == 0
        assert has(tab, "#newest .text", HOSTILE)
        tab.run("document.querySelector('.chart svg').dispatchEvent(new PointerEvent('pointermove', {clientX: 200}))")
        assert has(tab, ".chart figcaption span", "step ")
        assert tab.complaints == []
        assert [asked for asked in tab.asked if not asked.startswith(url)] == []
    assert HOSTILE not in tab.asked


def test_a_server_that_has_ended_is_said(tmp_path: Path) -> None:
    folder = run_at(tmp_path / "run", 8)
    says(folder)
    with chromium(tmp_path / "browser") as tab:
        with served(FollowedRun("run", folder)) as server:
            tab.show("phone")
            tab.open(server.url)
            assert not has(tab, "#link", "No answer")
        processes.wait_until(lambda: has(tab, "#link", "No answer from rlplus watch since "))

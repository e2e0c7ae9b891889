"""`shoal report`: a page of one recorded run, or of several side by side."""

from __future__ import annotations

from pathlib import Path

from shoal.commands import options
from shoal.commands.launching import check_folder
from shoal.commands.options import argument, option
from shoal.commands.output import show, write_text


def report(
    runs: list[Path] = argument("Folders of `shoal run … --record DIR`.", ..., metavar="DIR"),
    out: Path = option(
        "Where to write the page.", Path("report.html"), "--out", "-o", metavar="FILE"
    ),
    as_json: options.Json = False,
) -> None:
    """Write a page about recorded runs, for any browser, without a network.

    Timeline, loss, where the time went, traffic, and what the strategy counts. Several runs are
    shown side by side.
    """
    check_folder(out, "the page")
    from shoal.observe.report_page.record import RecordedRun
    from shoal.observe.report_page.sections import page  # only when the options are right

    text = page([RecordedRun.read(folder) for folder in runs])
    write_text(out, text)
    size = f"{len(text.encode()) / 1e6:.1f} MB"
    document = {"page": str(out), "runs": list(map(str, runs)), "bytes": len(text.encode())}
    show(document, [f"page: {out} ({size}; open it in a browser)"], as_json)

"""`report`: one page about a run."""

from pathlib import Path


def report(run: Path, output: Path | None = None) -> None:
    """Write a page about a run for people who were not there: one HTML file with its pictures inside.

    Args:
        run: The run's folder, such as `checkpoints/runs/NAME/version_0`, with the `config.yaml` that `fit` wrote.
        output: The HTML file to write; `report.html` in the run's folder where none is given.
    """
    from embeddings.common import InputError
    from embeddings.figures import check_output, write_report

    if not run.is_dir():
        raise InputError(str(run), "is no folder", "give that of a run of fit, such as checkpoints/runs/NAME/version_0")
    path = output or run / "report.html"
    check_output(path, "an HTML file")
    write_report(run, path)
    print(f"wrote {path}")

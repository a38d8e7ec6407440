"""The command line: `python main.py fit --config …`; `python main.py --help` lists every command."""

from embeddings.cli.main import main
from embeddings.common.signals import ignore_stop_signals

if __name__ == "__main__":
    code = main()
    # The run has ended; a signal during the exit would only change the exit code.
    ignore_stop_signals()
    raise SystemExit(code)

"""The parser's messages as one line with a hint."""

import pytest

from embeddings.cli.main import main
from embeddings.cli.parser import explain

OPTIONS = ["--help", "--top_k", "--near_duplicates", "--margin", "--model", "--margin", "--trainer.max_steps"]
OF_SOURCE = "Problem with given class_path 'embeddings.data.SourceConfig':\n  Option 'colums' is not accepted"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("unrecognized arguments: --top_q 3", "; did you mean --top_k? --help lists the options"),
        ("unrecognized arguments: --near 3", "; did you mean --near_duplicates?"),
        ("unrecognized arguments: --m=3", "; did you mean --margin or --model? --help"),
        ("Subcommand 'fit' does not accept option 'trainer.max_stepz'", "; did you mean trainer.max_steps? --help"),
        (OF_SOURCE, "Option 'colums' is not accepted by SourceConfig; did you mean columns? --help"),
        # A class outside the allow-list is not imported for its arguments.
        (OF_SOURCE.replace("embeddings.data", "foreign"), "Option 'colums' is not accepted by SourceConfig; --help"),
        ("Import path x.Y does not correspond to a subclass of Z.", "a subclass of Z; --help lists the options"),
        ("temperature must be > 0, got 0; try 0.05", "got 0; try 0.05"),
    ],
)
def test_a_message_gets_a_hint_and_an_unknown_name_a_suggestion(message, says, tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    line = explain(message, OPTIONS)
    assert says in line
    assert line.startswith(message.rpartition("\n  ")[2].rstrip("."))


KEYS = """
model:
  class_path: embeddings.modules.NVEmbedModule
  init_args:
    optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 1.0e-4}}
    loss.init_args.temperature: 0.05
data: {class_path: embeddings.data.EmbeddingDataModule}
trainer: {callbacks+: [{class_path: lightning.pytorch.callbacks.ModelCheckpoint}]}
"""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--lr 1e-3", "--model.init_args.optimizer.init_args.lr"),
        ("--loss.temperature 4", "--model.init_args.loss.init_args.temperature"),
        ("--epochs 4", "--trainer.max_epochs"),
    ],
)
def test_the_last_part_of_a_key_as_option_suggests_the_full_key(given, meant, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(KEYS)
    assert main(["fit", "--config", str(path), *given.split()]) == 2
    says = f"unrecognized arguments: {given}; did you mean {meant}? --help lists the options"
    assert capsys.readouterr().err == f"error: {says}\n"

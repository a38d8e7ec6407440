from embeddings.cli.main import main


def test_the_command_builds_the_corpus_where_it_is_told(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "embeddings.cli.quickstart.prepare_docstrings", lambda output, force: calls.append((output, force))
    )
    assert main(["prepare", "docstrings", "--output", str(tmp_path / "out"), "--force", "true"]) == 0
    assert calls == [(tmp_path / "out", True)]


def test_a_folder_that_holds_something_else_is_refused(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["prepare", "docstrings", "--output", str(tmp_path)]) == 2
    assert "must be new, empty or an earlier docstring corpus" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

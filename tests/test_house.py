"""What holds for every file of the house."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_source_file_has_its_mirror_test():
    sources = [p for p in (ROOT / "embeddings").rglob("*.py") if p.name != "__init__.py"]
    assert len(sources) >= 40
    missing = [
        str(path.relative_to(ROOT))
        for path in sources
        if not (ROOT / "tests" / path.relative_to(ROOT / "embeddings").parent / f"test_{path.name}").is_file()
    ]
    assert missing == []


def test_no_file_names_a_path_of_a_machine():
    import re

    files = [p for p in ROOT.rglob("*") if p.suffix in {".py", ".yaml", ".md", ".cfg"} and ".venv" not in p.parts]
    files = [p for p in files if not {"checkpoints", "data", ".cache"} & set(p.relative_to(ROOT).parts[:1])]
    assert len(files) > 60
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work|mnt|Users)/\w")
    assert [str(p) for p in files if p != Path(__file__) and pattern.search(p.read_text(encoding="utf-8"))] == []

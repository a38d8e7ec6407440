"""`show routing`: where a sparse model sends the tokens of some texts, or how evenly its experts were used in runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from embeddings.inference import ExpertLoads


def routing(
    texts: list[str],
    model: str | None = None,
    runs: Path | list[Path] | None = None,
    output: Path = Path("routing.png"),
    input: Path | None = None,
    prompt_name: str | None = None,
    role: Literal["document", "query"] | None = None,
) -> None:
    """Draw where the tokens of some texts go in a sparse model, or how evenly the experts were used over training runs.

    With `--model`, a row a sparse layer and a column an expert, printed as a table too. With `--runs`, two curves a run
    of what the callback `RoutingStatistics` logged: the load entropy and the number of idle experts.

    Args:
        texts: The texts, with a model only. One that occurs twice counts once.
        model: A model directory or Hub id.
        runs: Folders of runs, each of which holds the `metrics.csv` that `fit` wrote; several as `[RUN, RUN]`.
        output: The PNG file to write.
        input: A JSONL file (`.gz` too) or Parquet file with `text`, and `title` where there are any, in place of texts.
        prompt_name: Which of the model's prompts goes before each text; the one of the role's name where none is given.
            Its tokens are counted too.
        role: Whose prompt and length limit hold for the texts; `document` if left out.
    """
    from embeddings.common import OptionError
    from embeddings.figures import check_output

    if (model is None) == (runs is None):
        given = "neither" if model is None else "both"
        raise OptionError("model", given, "or runs must be given", "give exactly one: --model DIR TEXT, or --runs RUN")
    if model is None:
        options = {"TEXT": texts, "input": input, "prompt_name": prompt_name, "role": role}
        _show_runs([runs] if isinstance(runs, Path) else list(runs or ()), output, options)
        return
    if bool(texts) == (input is not None):
        given = "both" if texts else "neither"
        raise OptionError("TEXT", given, "or input must be given", "give texts, or --input FILE")
    for text in texts:
        if not text.strip():
            raise OptionError("TEXT", text, "must not be empty", "give a sentence")
    check_output(output)
    _show_model(model, texts if input is None else _texts_of(input), output, prompt_name, role or "document")


def _show_runs(runs: list[Path], output: Path, unused: dict[str, Any]) -> None:
    from embeddings.common import OptionError
    from embeddings.figures import check_output, draw_routing_curves

    for name, value in unused.items():
        if value:
            raise OptionError(name, value, "has no effect on runs", "leave it out, or give --model in place of --runs")
    if not runs:
        raise OptionError("runs", runs, "must name a run", "give a folder such as checkpoints/runs/NAME/version_0")
    check_output(output)
    draw_routing_curves(runs, output)
    print(f"wrote {output}")


def _show_model(
    model: str, texts: list[str], output: Path, prompt_name: str | None, role: Literal["document", "query"]
) -> None:
    from embeddings.common.text import one_line
    from embeddings.figures import draw_expert_loads
    from embeddings.inference import Encoder, expert_loads

    encoder = Encoder.from_pretrained(model, precision="float32", show_progress=len(texts) > 1000)
    loads = expert_loads(encoder, texts, prompt_name, role)
    num_texts, num_experts = len(set(texts)), loads.count_YX.shape[1]
    title = f"{one_line(Path(model).name, 40)}: where the tokens of {num_texts:,} text{'s' * (num_texts > 1)} go"
    subtitle = (
        f"{loads.num_tokens:,} tokens, prompts and special tokens among them, each to {loads.top_k} of "
        f"{num_experts} experts. Layers and experts count from 0."
    )
    draw_expert_loads(loads, title, subtitle, output)
    print(f"{title}\n{subtitle}\n\n{_table(loads)}\n\nwrote {output}")


def _texts_of(path: Path) -> list[str]:
    """The texts of a file.

    Raises:
        InputError: If the file cannot be used, or holds no text.
    """
    from embeddings.common import InputError
    from embeddings.inference import read_corpus

    texts = [document.text for document in read_corpus(path)]
    if not any(text.strip() for text in texts):
        raise InputError(f"--input {path}", "holds no text", "give a file with texts")
    return texts


def _table(loads: "ExpertLoads") -> str:
    """Each layer's metrics and its experts' shares."""
    from embeddings.models.routing_metrics import load_metrics

    load, experts = load_metrics(loads.count_YX), range(loads.count_YX.shape[1])
    lines = ["layer  entropy  busiest/even  idle " + "".join(f"{expert:>7}" for expert in experts)]
    rows = zip(loads.layers, load.entropy_Y, load.highest_Y, load.idle_Y, loads.share_YX.tolist(), strict=True)
    for layer, entropy, highest, idle, shares in rows:
        numbers = f"{layer:>5}  {float(entropy):>7.3f}  {float(highest):>12.2f}  {int(idle):>4} "
        lines.append(numbers + "".join(f"{share:>7.1%}" for share in shares))
    return "\n".join(lines)

"""Which of a model's prompts goes before the texts of a task."""

from collections.abc import Mapping

# What mteb calls each kind of evaluation folder.
TASK_TYPES = {
    "retrieval": "Retrieval",
    "reranking": "Reranking",
    "sts": "STS",
    "pair_classification": "PairClassification",
    "classification": "Classification",
    "clustering": "Clustering",
    "summarisation": "Summarization",
}


def task_prompt(prompts: Mapping[str, str], task: str, task_type: str, role: str | None) -> str:
    """The most special of a model's prompts for a text, by mteb's rule.

    That is the prompt named like the task, else like its type, else like the text's role. Of the first two a name with
    `-query` or `-document` behind it comes before the bare one, for a text of that role. A text of a task that knows no
    roles (one of a pair to compare, one to classify or to cluster) gets no role's prompt.

    Args:
        prompts: The model's prompts by name.
        task: The task's name.
        task_type: mteb's name of its type, such as `STS`.
        role: `query`, `document`, or None where the task knows no roles.

    Returns:
        The prompt, empty where none fits.
    """
    names = [task, task_type]
    if role is not None:
        names = [f"{task}-{role}", task, f"{task_type}-{role}", task_type, role]
    return next((prompts[name] for name in names if name and name in prompts), "")

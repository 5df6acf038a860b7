"""``python -m glm46 evaluate``: loss, loss by position and needle in a haystack of a checkpoint or a folder."""

from collections.abc import Sequence

from glm46.operate.models.evaluate_options import evaluate_parser, stated_sources


def evaluate_command(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code.

    Raises:
        UserError: an option is out of range, a folder cannot be used, or the text has no rows of these lengths.
    """
    arguments = evaluate_parser().parse_args(list(argv))
    sources = stated_sources(arguments)
    from glm46.operate.models.evaluate_start import start_evaluation  # numpy and jinja2: --help needs neither

    code = start_evaluation(argv, arguments, sources)
    if code is not None:
        return code
    from glm46.operate.models.evaluate_ranks import evaluate  # torch: refusals come before it

    evaluate(arguments, sources)
    return 0

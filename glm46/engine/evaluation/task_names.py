"""Names of the tasks of this package, which the command line reads without torch."""

TASKS = ("loss", "position", "needle", "drafts")
USUAL_TASKS = TASKS[:3]
"""Tasks that work for every model."""

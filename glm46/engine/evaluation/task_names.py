"""Names of the tasks of this package, which the command line reads without torch."""

TASKS = ("loss", "position", "needle", "drafts")
USUAL_TASKS = TASKS[:3]
"""Those that every model has."""

"""A worker extension that also reads the prediction layer, which drafts; vLLM's Python imports it, not pytest."""

from glm_ext import Extension as _Extension


class Extension(_Extension):
    """See `glm_ext.Extension`."""

    def read_draft(self, name: str) -> dict:
        """The first values of a parameter that vLLM does not pack."""
        return {"values": self.model_runner.get_draft_model().get_parameter(name).flatten()[:64].tolist()}

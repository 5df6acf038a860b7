"""Names of the schemes of quantised weights, which the command line reads without torch; see `schemes`."""

FP8_NAMES = "fp8-block", "fp8-channel"
SCHEME_NAMES = *FP8_NAMES, "int4"

"""Measuring and building: what is timed (`cells`), how (`measure`, `screen`), in which order (`tune`), where it is kept
(`journal`), and how a policy follows from it (`build`, pure)."""

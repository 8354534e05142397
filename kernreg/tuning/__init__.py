"""Measuring and building: what is timed (`grids`, `cells`), how (`screen`, `fingerprints`, `measure`, `workers`), in which order
(`tuner`), where it is kept (`journal`), how a policy follows from it (`choose`, `build`), and what that costs (`prices`)."""

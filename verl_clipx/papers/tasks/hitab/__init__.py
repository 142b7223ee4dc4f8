"""HiTab: questions about tables whose headers are hierarchies (Cheng et al. 2022, arXiv 2108.06712)."""

"""Measuring an engine on real prompts: data sets, the grid, the report."""

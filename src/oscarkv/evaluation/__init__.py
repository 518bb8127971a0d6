"""Measuring what a recipe costs in accuracy. Imports integrations and everything below."""

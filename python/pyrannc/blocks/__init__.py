"""Runs of Ops as functions that can be called."""

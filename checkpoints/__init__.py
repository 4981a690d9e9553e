"""Shipped policies, traces and cost models, each in a folder with a card."""

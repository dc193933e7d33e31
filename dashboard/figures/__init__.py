"""Figures: pure functions from the API's JSON to Plotly and Cytoscape dictionaries."""

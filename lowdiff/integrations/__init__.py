"""Other people's tools that lowdiff works with; each module needs an extra of its own."""

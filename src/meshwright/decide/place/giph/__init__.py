"""GiPH: moves of tasks chosen by a trained net (`strategy`), and its training (`train`). See docs/placement.md."""

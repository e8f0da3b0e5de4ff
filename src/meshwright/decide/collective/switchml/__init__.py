"""SwitchML: every rank sends its data once, to a switch that adds it up slot by slot and sends the sum back."""

"""Blink: trees packed over what links an allocation has."""

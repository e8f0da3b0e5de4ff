"""Schedules handed to other tools and taken over from them, each checked."""

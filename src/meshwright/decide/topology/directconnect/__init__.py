"""Direct connections without switches: which cables to plug, and what breadth-first broadcasts over them cost, exactly."""

"""ForestColl: spanning trees that use every link of the bottleneck fully."""

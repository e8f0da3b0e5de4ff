"""Which module, stage and step of a training loop every slice of a trace belongs to, on what evidence, and where the time went.

Cite: D. Snider, F. Chevalier, G. Pekhimenko, Hotline Profiler: Automatic Annotation and A Multi-Scale Timeline for Visualizing Time-Use in
DNN Training, MLSys 2023.
Left open by the paper: what a match rests on; backward is matched by names like forward. Our answer: four tiers of evidence, each named
on every node; backward follows autograd's sequence numbers to the forward operator; forward is aligned with a captured sequence or
by dynamic programming instead of a greedy walk, so that one missing module does not shift those after it.
Invariant: every ns of every track is in exactly one leaf, and all levels add up in whole ns. Cost: O(slices log slices) plus alignments
of distinct steps.
"""

from .labels import Evidence, Labels, Stage
from .result import Annotation, Node
from .whole import CITE, annotate, label

__all__ = ["CITE", "Annotation", "Evidence", "Labels", "Node", "Stage", "annotate", "label"]

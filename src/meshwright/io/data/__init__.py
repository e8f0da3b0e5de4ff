"""Indices of training data in shards: tar archives (WebDataset's naming) and MosaicML's MDS."""

from __future__ import annotations

from .mds import MdsShard, read_mds_index, read_mds_offsets, split_mds_sample
from .tar import TarSample, read_tar_index

__all__ = ["MdsShard", "TarSample", "read_mds_index", "read_mds_offsets", "read_tar_index", "split_mds_sample"]

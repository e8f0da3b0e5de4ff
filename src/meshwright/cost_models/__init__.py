"""Models of seconds fitted to measured tables: of matrix products (`products`, `tiles`) and of collectives (`collectives`).

Two kinds, kept apart. Interpolating models answer where a table was measured nearby. Compact models have at most eight numbers per table and answer
where no table fits: another shape, another GPU count, sizes beyond the last row. Arrays in, arrays out; which table a number came from is
`meshwright.io.costs.perf_tables`' business. Needs numpy; nothing here is loaded by `import meshwright`.
"""

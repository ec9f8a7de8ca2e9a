"""The data gate: facts about every row (pure), expectations on them (Great Expectations), and the report."""

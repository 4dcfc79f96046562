//! Moves sequences and cached blocks of `kvpool` between nodes.

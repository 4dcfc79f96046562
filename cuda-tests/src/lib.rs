//! kvpool's GPU code without a GPU.

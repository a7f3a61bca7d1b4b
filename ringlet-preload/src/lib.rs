//! Exported C symbols. No logic.

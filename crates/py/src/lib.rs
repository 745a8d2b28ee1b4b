//! `pyrannc._native`.

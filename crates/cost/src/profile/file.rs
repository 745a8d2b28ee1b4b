//! The profile file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rannc_ir::sealed::{self, SealError, Sealed};
use thiserror::Error;

use super::fault::ProfileFault;
use super::profile::{PROFILE_SCHEMA, Profile};

/// Why a profile file cannot be used.
#[derive(Debug, Error)]
pub enum ProfileError {
    /// The file cannot be read.
    #[error("cannot read the profile file {}: {source}; check that it exists on this machine and may be read", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write the profile file {}: {source}; check that its folder exists and has space", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The text is not JSON.
    #[error("the profile is not JSON ({0}); the file is cut short or is not a profile: measure again")]
    NotJson(#[source] serde_json::Error),
    /// The JSON is not a profile.
    #[error("the profile's JSON does not have the form of a profile ({0}); measure again")]
    Form(#[source] serde_json::Error),
    /// Another version of the file format.
    #[error(
        "the profile file has schema {found}, this RaNNC reads schema {PROFILE_SCHEMA}; measure again with this version"
    )]
    Schema {
        /// What the file says.
        found: String,
    },
    /// The content is not what was written.
    #[error(
        "the profile's checksum is {found}, its content gives {computed}; the file was damaged or edited: measure again"
    )]
    Checksum {
        /// What the file says.
        found: String,
        /// What the content gives.
        computed: String,
    },
    /// The figures contradict each other.
    #[error("the profile contradicts itself: {0}; measure again")]
    Inconsistent(#[from] ProfileFault),
}

impl Sealed for Profile {
    const SCHEMA: u32 = PROFILE_SCHEMA;

    fn checksum(&mut self) -> &mut String {
        &mut self.checksum
    }
}

impl From<SealError> for ProfileError {
    fn from(error: SealError) -> Self {
        match error {
            SealError::NotJson(error) => Self::NotJson(error),
            SealError::Schema { found } => Self::Schema { found },
            SealError::Form(error) => Self::Form(error),
            SealError::Checksum { found, computed } => Self::Checksum { found, computed },
        }
    }
}

impl Profile {
    /// Checks that the figures agree with each other and computes the checksum.
    pub fn seal(self) -> Result<Self, ProfileError> {
        self.check()?;
        Ok(sealed::seal(self))
    }

    /// The file's text. The same Profile gives the same bytes.
    pub fn to_json(&self) -> String {
        sealed::to_json(self)
    }

    /// Reads a file's text and checks form, schema, checksum and figures.
    pub fn from_json(text: &str) -> Result<Self, ProfileError> {
        let profile: Self = sealed::from_json(text)?;
        profile.check()?;
        Ok(profile)
    }

    /// Reads a profile file.
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let text = fs::read_to_string(path).map_err(|source| ProfileError::Read { path: path.to_owned(), source })?;
        Self::from_json(&text)
    }

    /// Writes a profile file.
    pub fn write(&self, path: &Path) -> Result<(), ProfileError> {
        sealed::write(path, &self.to_json()).map_err(|source| ProfileError::Write { path: path.to_owned(), source })
    }
}

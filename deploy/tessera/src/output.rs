//! Writes to the terminal; a reader that has gone is no error of ours.

use std::io::{ErrorKind, Write};

use anyhow::{Context as _, Result};

/// Prints one line to standard output, at once.
///
/// # Errors
/// When it cannot be written, such as to a full disk.
pub(crate) fn line(text: &str) -> Result<()> {
    write(&mut std::io::stdout().lock(), &format!("{text}\n")).map(|_| ())
}

/// Prints text to standard output, at once; false when nobody reads it any more.
///
/// # Errors
/// When it cannot be written, such as to a full disk.
pub(crate) fn piece(text: &str) -> Result<bool> {
    write(&mut std::io::stdout().lock(), text)
}

fn write(out: &mut impl Write, text: &str) -> Result<bool> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("cannot write to standard output"),
    }
}

/// Prints one line to standard error.
pub(crate) fn error(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Shows on a terminal that something goes on, and what; shows nothing elsewhere.
pub(crate) fn spinner() -> indicatif::ProgressBar {
    let spinner = indicatif::ProgressBar::new_spinner();
    spinner.enable_steady_tick(std::time::Duration::from_millis(200));
    spinner
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails to write.
    struct Broken(ErrorKind);

    impl Write for Broken {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_a_reader_that_has_gone_is_forgiven() {
        assert!(write(&mut Vec::new(), "text").unwrap());
        assert!(!write(&mut Broken(ErrorKind::BrokenPipe), "text").unwrap());
        let full = write(&mut Broken(ErrorKind::StorageFull), "text").unwrap_err();
        assert!(format!("{full:#}").starts_with("cannot write to standard output: "), "{full:#}");
    }
}

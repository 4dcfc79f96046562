//! The terminal, which is restored however the program ends.

use std::io::{self, IsTerminal, stdin, stdout};

use crossterm::cursor::{MoveTo, Show};
use crossterm::execute;
use crossterm::terminal::{Clear, ClearType};
use ratatui::{DefaultTerminal, Frame};

/// The terminal in its alternate screen, without echo. Dropping this restores it, and so does a
/// panic, before its message is printed.
pub struct Screen {
    terminal: DefaultTerminal,
}

impl Screen {
    /// Whether standard input and output are terminals.
    pub fn is_there() -> bool {
        stdin().is_terminal() && stdout().is_terminal()
    }

    /// Takes over the terminal. Fails with the system's error.
    pub fn open() -> io::Result<Self> {
        match ratatui::try_init() {
            Ok(terminal) => Ok(Self { terminal }),
            Err(error) => {
                // It may have been taken partially.
                restore();
                Err(error)
            }
        }
    }

    pub(super) fn draw(&mut self, drawing: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(drawing).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The hook has left the alternate screen and printed the message. Leaving it again
            // would put the cursor before the message.
            let _ = execute!(stdout(), Show);
            return;
        }
        // After a resize, tmux shows lines of the alternate screen on the normal one.
        let _ = execute!(stdout(), Clear(ClearType::All), MoveTo(0, 0));
        restore();
    }
}

/// Restores the terminal, unless it has gone away.
fn restore() {
    let _ = ratatui::try_restore();
    let _ = execute!(stdout(), Show);
}

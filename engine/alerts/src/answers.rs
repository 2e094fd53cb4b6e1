//! The connection to a mail server, with a limit on the bytes that the server sends.

use std::io::{Error, Result};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use lettre::transport::smtp::client::AsyncTokioStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// Most bytes that a server may send in a session, with those of TLS after STARTTLS. lettre checks
/// the length of a line only at its end, so this also limits a line without one.
const MOST: usize = 256 * 1024;
/// The first byte of a TLS handshake.
const HANDSHAKE: u8 = 22;

#[derive(Debug)]
pub(crate) struct Answers<S> {
    stream: S,
    left: usize,
    /// Before STARTTLS reads have one byte. Bytes after its answer then stay in the socket, and the
    /// handshake refuses them. Otherwise the client would read them as answers after the handshake.
    is_clear: bool,
}

impl Answers<TcpStream> {
    pub(crate) fn before_starttls(stream: TcpStream) -> Self {
        let (left, is_clear) = (MOST, true);
        Self {
            stream,
            left,
            is_clear,
        }
    }
}

impl<S> Answers<S> {
    pub(crate) fn new(stream: S) -> Self {
        let (left, is_clear) = (MOST, false);
        Self {
            stream,
            left,
            is_clear,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Answers<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        if self.left == 0 {
            let cause = format!("the server has sent more than {MOST} bytes");
            return Poll::Ready(Err(Error::other(cause)));
        }
        let read = if self.is_clear && into.remaining() > 0 {
            let mut byte = [0];
            let mut one = ReadBuf::new(&mut byte);
            ready!(Pin::new(&mut self.stream).poll_read(context, &mut one))?;
            into.put_slice(one.filled());
            one.filled().len()
        } else {
            let before = into.filled().len();
            ready!(Pin::new(&mut self.stream).poll_read(context, into))?;
            into.filled().len() - before
        };
        self.left = self.left.saturating_sub(read);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Answers<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        self.is_clear &= bytes.first() != Some(&HANDSHAKE);
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl AsyncTokioStream for Answers<TcpStream> {
    fn peer_addr(&self) -> Result<SocketAddr> {
        self.stream.peer_addr()
    }
}

impl AsyncTokioStream for Answers<TlsStream<TcpStream>> {
    fn peer_addr(&self) -> Result<SocketAddr> {
        self.stream.get_ref().0.peer_addr()
    }
}
